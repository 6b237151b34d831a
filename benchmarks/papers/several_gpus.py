"""windlass's own plans for several GPUs of Ratel's server, and what the papers say of several GPUs."""

from dataclasses import dataclass

from benchmarks.papers.published.models import RATEL_SHAPES
from benchmarks.papers.published.stages import NUM_EXAMPLES, NUM_TOKENS
from benchmarks.papers.published.throughput import planned_job, server_of_products
from benchmarks.reporting.page import Page
from windlass.planner.question import PlanReport

_SIZES = (13, 70)
_NUM_GPUS = (1, 2, 4)
# Section V-G: the throughput of Ratel over that of ZeRO-Infinity on four GPUs, by billions of parameters.
PUBLISHED_OVER_ZERO_INFINITY = {13: 2.21, 70: 1.69}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralGpus:
    """The plan of a model on a number of GPUs."""

    size: int  # billions of parameters
    num_gpus: int
    num_examples: int  # of a step
    report: PlanReport

    @property
    def tokens_per_s(self) -> float:
        """The tokens of a step over its simulated time."""
        assert self.report.step_s is not None
        return self.num_examples * NUM_TOKENS / self.report.step_s


def plan_for_gpus(size: int, num_gpus: int) -> SeveralGpus:
    """Plans a model on Ratel's server, with as many examples for each GPU."""
    server = server_of_products()
    server = server.model_copy(update={"gpus": server.gpus.model_copy(update={"count": num_gpus})})
    num_examples = NUM_EXAMPLES * num_gpus
    report = planned_job(RATEL_SHAPES[size], server, batch_size=num_examples, num_tokens=NUM_TOKENS, num_gpus=num_gpus)
    return SeveralGpus(size=size, num_gpus=num_gpus, num_examples=num_examples, report=report)


def add_several_gpus(page: Page) -> dict[str, float]:
    """Adds the plans by number of GPUs. Returns the figures of the last line."""
    page.add(
        "## Several GPUs",
        f"windlass's own plans for Ratel's server with up to four GPUs, batch {NUM_EXAMPLES} x {NUM_TOKENS} for each, "
        "without clipping, as `windlass plan` makes them, with the rates of the table of throughputs; each GPU has its "
        "own link. Bound: what is left of the step when nothing waits. The step is simulated, block by block.",
    )
    rows, figures = [], dict[str, float]()
    for size in _SIZES:
        plans = [plan_for_gpus(size, num_gpus) for num_gpus in _NUM_GPUS]
        for each in plans:
            report = each.report
            choices = report.choices or {}
            rows.append(
                (
                    f"{size}B",
                    str(each.num_gpus),
                    str(each.num_examples),
                    str(choices["num_microbatches"]),
                    f"{report.bound_s:.1f}",
                    f"{report.step_s:.1f}",
                    str(report.bottleneck),
                    f"{each.tokens_per_s:.0f}",
                    f"{each.tokens_per_s / plans[0].tokens_per_s:.2f}",
                )
            )
        figures[f"four_gpus_over_one_{size}b"] = plans[-1].tokens_per_s / plans[0].tokens_per_s
    page.add_table(
        ("model", "GPUs", "examples", "micro-batches", "bound, s", "step, s", "busiest", "tokens/s", "over one"),
        rows,
    )
    ratios = " and ".join(f"{ratio:g} times ({size}B)" for size, ratio in PUBLISHED_OVER_ZERO_INFINITY.items())
    page.add(
        f"Published: on four GPUs Ratel's throughput is {ratios} that of ZeRO-Infinity (section V-G), each at the "
        "batch that suits it. The throughputs themselves and the batches are only drawn, in its figure 11, so there is "
        "nothing to put beside these plans. The same is true of AutoHete's eight GPUs, of which the text has averages "
        "over other systems: 2.31 times ZeRO-Offload, 1.63 times PatrickStar, 1.33 times StrongHold. Both share "
        "model states out over GPUs and exchange them, which the arithmetic for other systems does not have.",
        "The SSDs have the model states of all GPUs once, and the swapped activations of each. With more GPUs they are "
        "busier, and the time in which GPUs wait for them, which only the simulation has, grows.",
    )
    return figures
