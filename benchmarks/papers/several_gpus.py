"""The table of `benchmarks.papers` about several GPUs: windlass's plans for Ratel's server with up to four."""

from dataclasses import dataclass

from benchmarks.papers.decoder_sizes import gpt_profile
from benchmarks.papers.published_models import RATEL_SHAPES
from benchmarks.papers.published_stages import NUM_EXAMPLES, NUM_TOKENS, ratel_server
from benchmarks.reporting.page import Page
from windlass.engine.model import BlockLayout, ModelLayout, ParamSlice
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import speeds_of
from windlass.planner.simulation import simulated_step_s
from windlass.planner.solver import PlannedJob, Solution, limits_of, solve_job
from windlass.storage.ids import BlockIndex

_SIZES = (13, 70)  # billions of parameters: section V-G
_NUM_GPUS = (1, 2, 4)
_MICROBATCH_SIZES = (2, 4, 8, 16)  # examples; the fastest is taken
_CHUNK_NUMEL = 2**24
_NUM_OPTIMIZERS = 2
# Section V-G: the throughput of Ratel over that of ZeRO-Infinity on four GPUs, by billions of parameters.
PUBLISHED_OVER_ZERO_INFINITY = {13: 2.21, 70: 1.69}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The fastest plan of a model on a number of GPUs, by the planner's costs."""

    size: int
    num_gpus: int
    num_examples: int  # of a step
    solution: Solution


def planned_step(size: int, num_gpus: int) -> PlannedStep:
    """Plans a model on Ratel's server, with as many examples for each GPU."""
    num_examples = NUM_EXAMPLES * num_gpus
    solutions = (_solution(size, num_gpus, num_examples, examples) for examples in _MICROBATCH_SIZES)
    fastest = min(solutions, key=lambda solution: solution.step_s)
    return PlannedStep(size=size, num_gpus=num_gpus, num_examples=num_examples, solution=fastest)


def _solution(size: int, num_gpus: int, num_examples: int, examples: int) -> Solution:
    server = ratel_server()
    server = server.model_copy(update={"gpus": server.gpus.model_copy(update={"count": num_gpus})})
    model = gpt_profile(RATEL_SHAPES[size], num_examples=examples, num_tokens=NUM_TOKENS, chunk_numel=_CHUNK_NUMEL)
    training = TrainingConfig(
        batch_size=num_examples,
        num_microbatches=num_examples // examples,
        sequence_length=NUM_TOKENS,
        clip_norm=None,
        total_steps=1,
    )
    job = PlannedJob(model=model, training=training, num_ranks=num_gpus, num_optimizers=_NUM_OPTIMIZERS)
    return solve_job(job, speeds_of(server, num_gpus), limits_of(server, num_gpus))


def simulated_step_s_of(step: PlannedStep) -> float:
    """Returns the simulated time of a planned step. Every block counts as one tensor."""
    model = step.solution.costs.job.model
    blocks = []
    for index, block in enumerate(model.blocks):
        whole = ParamSlice(name=f"block{index}", shape=(block.numel,), offset=0, numel=block.numel, decay=True)
        blocks.append(BlockLayout(index=BlockIndex(index), name=f"block{index}", params=(whole,)))
    shared = tuple(tuple(map(BlockIndex, each)) for each in model.shared)
    layout = ModelLayout(blocks=tuple(blocks), tied={}, chunk_numel=model.chunk_numel, shared=shared)
    return simulated_step_s(step.solution, layout, num_cores=1)


def add_several_gpus(page: Page) -> dict[str, float]:
    """Adds the plans by number of GPUs. Returns the figures of the last line."""
    page.add(
        "## Several GPUs",
        f"windlass's own plans for Ratel's server with up to four GPUs, batch {NUM_EXAMPLES} x {NUM_TOKENS} for each, "
        "with the rates above; each GPU has its own link. Planned: the step by the planner's costs, with the "
        "micro-batches that make it shortest, and what is left when nothing waits. Simulated: the same plan, block by "
        "block, from which the throughput follows.",
    )
    rows, figures = [], dict[str, float]()
    for size in _SIZES:
        steps = [planned_step(size, num_gpus) for num_gpus in _NUM_GPUS]
        tokens_per_s = [step.num_examples * NUM_TOKENS / simulated_step_s_of(step) for step in steps]
        for step, rate in zip(steps, tokens_per_s, strict=True):
            plan = step.solution.plan
            rows.append(
                (
                    f"{size}B",
                    str(step.num_gpus),
                    str(step.num_examples),
                    f"{plan.num_groups} of {plan.group_size}",
                    f"{step.solution.step_s:.1f}",
                    f"{step.num_examples * NUM_TOKENS / rate:.1f}",
                    f"{rate:.0f}",
                    f"{rate / tokens_per_s[0]:.2f}",
                )
            )
        figures[f"four_gpus_over_one_{size}b"] = tokens_per_s[-1] / tokens_per_s[0]
    page.add_table(
        ("model", "GPUs", "examples", "groups, of micro-batches", "planned, s", "simulated, s", "tokens/s", "over one"),
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
