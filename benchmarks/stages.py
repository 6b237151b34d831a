"""Plans one job over several boxes by the cost model: `python -m benchmarks.stages [--quick]`

Nothing is measured, so the result is the same on every machine. The full form takes minutes. It writes a section of
docs/cluster.md and its picture.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.reporting.heat_map import Panel, heat_maps
from benchmarks.reporting.page import DOCS, Page
from benchmarks.reporting.report import rounded
from windlass.engine.training_config import TrainingConfig
from windlass.planner.feasibility import with_part
from windlass.planner.hardware import Hardware, ModelShape, load, machine_of, published_models
from windlass.planner.profiling import ShapeConfig
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.stages import BoxKind, BoxPlans, StagesReport, best_plans

_MACHINE, _NUM_GPUS = "rtx4090-server", 4
_MODELS = ("llama-3.1-70b", "llama-3.1-405b")
_BATCH_SIZES = (64, 256)
_NUM_TOKENS = 1024
_NUM_BOXES = (1, 2, 4, 8)
_GBIT_PER_S = (10, 25, 100)
_SECTION = "## One job over several boxes: what plans say"
_PICTURE = "stages.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model and its batch size."""

    model: str
    batch_size: int

    @property
    def in_words(self) -> str:
        """The title of its table."""
        return f"{self.model}, {self.batch_size} x {_NUM_TOKENS} tokens"


def machine(gbit_per_s: float) -> Hardware:
    """Returns Ratel's server with four GPUs, each with its own PCIe link, and a network card."""
    server = machine_of(_MACHINE)
    return with_part(server, gpus=with_part(server.gpus, count=_NUM_GPUS), network_gb_per_s=gbit_per_s / 8)


def question_of_job(job: Job, hardware: Hardware) -> PlanQuestion:
    """Returns the question of a job that uses all GPUs of each box."""
    shape = load(ModelShape, published_models()[job.model])
    training = TrainingConfig(
        batch_size=job.batch_size,
        num_microbatches=_NUM_GPUS,
        sequence_length=_NUM_TOKENS,
        total_steps=1,
    )
    return PlanQuestion(
        config=ShapeConfig(shape=shape, num_tokens=_NUM_TOKENS),
        hardware=hardware,
        training=training,
        num_ranks=_NUM_GPUS,
        num_optimizers=2,
        chooses_microbatches=True,
        chooses_order=True,
    )


@cache
def _box_plans(job: Job) -> BoxPlans:
    question = question_of_job(job, machine(_GBIT_PER_S[0]))
    return BoxPlans(kind=BoxKind(name=_MACHINE, number=max(_NUM_BOXES), question=question), profiles=Profiles(question))


@cache
def plans_of(job: Job, gbit_per_s: float, numbers: tuple[int, ...]) -> dict[int, StagesReport]:
    """Returns the best plan for some numbers of boxes."""
    # The plans of a box do not depend on the network, so they are kept.
    boxes = _box_plans(job)
    question = replace(boxes.kind.question, hardware=machine(gbit_per_s))
    boxes = replace(boxes, kind=replace(boxes.kind, question=question))
    return {len(plan.boxes): plan for plan in best_plans([boxes], numbers=numbers)}


def _add_job(page: Page, job: Job, numbers: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    rows, one = [], plans_of(job, _GBIT_PER_S[0], numbers).get(1)
    for number in numbers:
        for rate in _GBIT_PER_S[:1] if number == 1 else _GBIT_PER_S:
            plan = plans_of(job, rate, numbers).get(number)
            head = (str(number), "-" if number == 1 else f"{rate} GbE")
            if plan is None:
                rows.append((*head, "does not fit", *[""] * 8))
                continue
            yield f"step_s_{job.model}_{job.batch_size}_{number}_{rate}", plan.step_s
            layers = [str(box.num_layers) for box in plan.boxes]
            rows.append(
                (
                    *head,
                    f"{plan.step_s:.1f} s",
                    f"{plan.tokens_per_s:.0f}",
                    "-" if one is None else f"{one.step_s / plan.step_s:.2f}x",
                    plan.bound_by,
                    f"{plan.waiting_share:.0%}",
                    f"{plan.network_s:.2g} s" if number > 1 else "-",
                    f"{plan.num_microbatches}",
                    f"{plan.group_size}",
                    ", ".join(layers),
                )
            )
    page.add(f"### {job.in_words}")
    page.add_table(
        (
            "boxes",
            "network",
            "step",
            "tokens a second",
            "of one box",
            "bound by",
            "waits",
            "network busy",
            "micro-batches",
            "of them in a group",
            "layers of the boxes",
        ),
        rows,
    )


def section(*, quick: bool) -> tuple[str, dict[str, float]]:
    """Returns the section's text, and the figures of the last line."""
    jobs = [Job(model=model, batch_size=size) for model in _MODELS for size in _BATCH_SIZES]
    numbers: tuple[int, ...] = _NUM_BOXES
    if quick:
        jobs, numbers = jobs[:1], _NUM_BOXES[:2]
    page = Page("")
    page.add(
        _SECTION,
        "**A job over several boxes cannot be submitted yet, and nothing below was run.** These are predictions of the "
        "planner's cost model for a job in stages: each box has a run of the model's blocks, with their states. Only "
        "hidden states and their gradients pass between boxes ([decision 51](decisions/0051-stages.md)). How a step's "
        "time follows is in [decision 53](decisions/0053-plans-over-boxes.md). For your model and boxes:",
    )
    page.add_command(
        "windlass plan --model llama-3.1-70b --batch-size 64 --seq-len 1024 --hardware rtx4090-server --boxes 4 "
        "--network 10"
    )
    page.add(
        f"The boxes below are `{_MACHINE}` (12 SSDs, 768 GiB of RAM) with {_NUM_GPUS} GPUs of 24 GB, each with a PCIe "
        "link of its own. Training is in bf16 with AdamW's states in fp32, and gradients are clipped. *Waits* is the "
        "share of a step in which the busiest box waits for others: it falls with more groups of micro-batches a step, "
        "so with larger batches. *Network busy* is the time in which the busiest network card sends. All GPUs of a box "
        "compute a group at once.",
        f"![Tokens a second of one job over several boxes](images/{_PICTURE})",
    )
    figures = dict[str, float]()
    for job in jobs:
        figures |= dict(_add_job(page, job, numbers))
    page.add("`python -m benchmarks.stages` writes this section.")
    return page.text.partition(_SECTION)[2], figures


def picture() -> str:
    """Returns the picture of tokens a second over boxes and network."""

    def tokens_per_s(job: Job, number: int, rate: float) -> float | None:
        plan = plans_of(job, rate, _NUM_BOXES).get(number)
        return None if plan is None else float(f"{plan.tokens_per_s:.3g}")

    return heat_maps(
        [
            [
                Panel(
                    title=job.in_words,
                    numbers=[[tokens_per_s(job, number, rate) for rate in _GBIT_PER_S] for number in _NUM_BOXES],
                )
                for job in (Job(model=model, batch_size=size) for size in _BATCH_SIZES)
            ]
            for model in _MODELS
        ],
        title="Tokens a second of one job over several boxes (planned, not run)",
        columns=[str(rate) for rate in _GBIT_PER_S],
        rows=[str(number) for number in _NUM_BOXES],
        column_title="Gbit/s between boxes",
        row_title="boxes",
        most=float("inf"),
    )


def with_section(document: str, text: str) -> str:
    """Returns a document with the section's text replaced."""
    before, heading, after = document.partition(_SECTION)
    if not heading:
        raise ValueError(f"the document has no section {_SECTION!r}")
    _, next_heading, rest = after.partition("\n## ")
    return before + heading + text.rstrip("\n") + "\n" + next_heading + rest


def main() -> None:
    """Prints the section, and writes it without `--quick`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one job on up to two boxes; writes nothing")
    options = parser.parse_args()
    text, figures = section(quick=options.quick)
    print(_SECTION + text)
    if not options.quick:
        (DOCS / "images" / _PICTURE).write_text(picture())
        path = DOCS / "cluster.md"
        path.write_text(with_section(path.read_text(), text))
    print(json.dumps(rounded(figures)))


if __name__ == "__main__":
    main()
