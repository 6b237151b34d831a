"""Plans one job over several boxes by the cost model: `python -m benchmarks.stages [--quick]`

Nothing is measured, so the result is the same on every machine. The full form takes a quarter of an hour. It
writes a section of docs/cluster.md and its picture.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.reporting.heat_map import Panel, heat_maps
from benchmarks.reporting.kept import KeptResults
from benchmarks.reporting.page import DOCS, Page
from benchmarks.reporting.report import rounded
from windlass.engine.memory_plan import MemoryTier
from windlass.engine.training_config import TrainingConfig
from windlass.planner.feasibility import with_part
from windlass.planner.hardware import Hardware, ModelShape, load, machine_of, published_models
from windlass.planner.profiling import ShapeConfig
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.stages import BoxKind, BoxPlans, StagesReport, best_plans

_MACHINE = "rtx4090-server"
# A simulation of the largest job takes minutes of CPU time.
_MOST_EVENTS = 20_000_000
# Models, each with the GPUs of a box and with its batch sizes: a row of the picture.
_MODELS = (("llama-3.1-70b", 4, (64, 256)), ("llama-3.1-70b", 1, (64,)), ("llama-3.1-405b", 4, (64, 256)))
_NUM_TOKENS = 1024
_NUM_BOXES = (1, 2, 4, 8)
_GBIT_PER_S = (10, 25, 100)
_SECTION = "## One job over several boxes: what plans say"
_PICTURE = "stages.svg"
_NOTHING_KEPT = KeptResults(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model and its batch size, on boxes with a number of GPUs each."""

    model: str
    batch_size: int
    num_gpus: int

    @property
    def in_words(self) -> str:
        """The title of its table."""
        gpus = "one GPU" if self.num_gpus == 1 else f"{self.num_gpus} GPUs"
        return f"{self.model}, {self.batch_size} x {_NUM_TOKENS} tokens, {gpus} a box"


_JOBS = [
    [Job(model=model, batch_size=size, num_gpus=number) for size in batch_sizes]
    for model, number, batch_sizes in _MODELS
]


def machine(job: Job, gbit_per_s: float) -> Hardware:
    """Returns Ratel's server with GPUs for a job, each with its own PCIe link, and a network card."""
    server = machine_of(_MACHINE)
    gpus = with_part(server.gpus, count=job.num_gpus)
    return with_part(server, gpus=gpus, network_gb_per_s=gbit_per_s / 8)


def question_of_job(job: Job, hardware: Hardware) -> PlanQuestion:
    """Returns the question of a job that uses all GPUs of each box."""
    shape = load(ModelShape, published_models()[job.model])
    training = TrainingConfig(
        batch_size=job.batch_size,
        num_microbatches=job.num_gpus,
        sequence_length=_NUM_TOKENS,
        total_steps=1,
    )
    return PlanQuestion(
        config=ShapeConfig(shape=shape, num_tokens=_NUM_TOKENS),
        hardware=hardware,
        training=training,
        num_ranks=job.num_gpus,
        num_optimizers=2,
        chooses_microbatches=True,
        chooses_cut=True,
        chooses_order=True,
    )


@cache
def _box_plans(job: Job) -> BoxPlans:
    question = question_of_job(job, machine(job, _GBIT_PER_S[0]))
    return BoxPlans(kind=BoxKind(name=_MACHINE, number=max(_NUM_BOXES), question=question), profiles=Profiles(question))


@cache
def _plan_of_one_box(job: Job) -> StagesReport | None:
    """Returns the best plan for one box with any number of its GPUs. None: none fits."""
    boxes = _box_plans(job)
    kind = replace(boxes.kind, number=1, question=replace(boxes.kind.question, chooses_ranks=True))
    return next(iter(_simulated([replace(boxes, kind=kind)], {1})), None)


def _simulated(boxes: Sequence[BoxPlans], numbers: set[int]) -> list[StagesReport]:
    return best_plans(boxes, numbers=numbers, simulates=True, most_events=_MOST_EVENTS)


@cache
def plans_of(
    job: Job, gbit_per_s: float, numbers: tuple[int, ...], kept: KeptResults = _NOTHING_KEPT
) -> dict[int, StagesReport]:
    """Returns the best plan for some numbers of boxes. `kept`: plans of earlier runs."""
    name = f"{job.in_words}, {gbit_per_s} Gbit per s, {numbers}"
    return kept.of(name, lambda: _plans_of(job, gbit_per_s, numbers))


def _plans_of(job: Job, gbit_per_s: float, numbers: tuple[int, ...]) -> dict[int, StagesReport]:
    # The plans of a box do not depend on the network, so they are kept.
    boxes = _box_plans(job)
    question = replace(boxes.kind.question, hardware=machine(job, gbit_per_s))
    boxes = replace(boxes, kind=replace(boxes.kind, question=question))
    plans = {len(plan.boxes): plan for plan in _simulated([boxes], set(numbers) - {1})}
    if 1 in numbers and (alone := _plan_of_one_box(job)) is not None:
        plans[1] = alone
    return plans


def _add_job(page: Page, job: Job, numbers: tuple[int, ...], kept: KeptResults) -> Iterator[tuple[str, float]]:
    rows, one = [], plans_of(job, _GBIT_PER_S[0], numbers, kept).get(1)
    for number in numbers:
        for rate in _GBIT_PER_S[:1] if number == 1 else _GBIT_PER_S:
            plan = plans_of(job, rate, numbers, kept).get(number)
            head = (str(number), "-" if number == 1 else f"{rate} GbE")
            if plan is None:
                rows.append((*head, "does not fit", *[""] * 10))
                continue
            print(f"{job.in_words}: {number} boxes, {rate} GbE: {plan.step_s:.1f} s", file=sys.stderr, flush=True)
            name = f"{job.model}_{job.batch_size}_{job.num_gpus}_gpus_{number}_{rate}"
            yield f"step_s_{name}", plan.step_s
            yield f"formula_s_{name}", plan.formula_step_s
            layers = [str(box.num_layers) for box in plan.boxes]
            rows.append(
                (
                    *head,
                    f"{plan.step_s:.1f} s" if plan.is_simulated else "not simulated",
                    f"{plan.formula_step_s:.1f} s",
                    f"{plan.tokens_per_s:.0f}",
                    "-" if one is None else f"{one.step_s / plan.step_s:.2f}x",
                    plan.bound_by,
                    f"{plan.waiting_share:.0%}",
                    f"{plan.network_s:.2g} s" if number > 1 else "-",
                    f"{plan.gpus}",
                    f"{-(-plan.num_microbatches // plan.group_size)} of {plan.group_size}",
                    _memory_in_words(plan),
                    ", ".join(layers),
                )
            )
    page.add(f"### {job.in_words}")
    page.add_table(
        (
            "boxes",
            "network",
            "step",
            "by the formula",
            "tokens a second",
            "of one box",
            "bound by",
            "waits",
            "network busy",
            "GPUs a box",
            "groups of micro-batches",
            "memory in GiB: a GPU, RAM, SSDs",
            "layers of the boxes",
        ),
        rows,
    )


def _memory_in_words(plan: StagesReport) -> str:
    """Returns the peaks of the three tiers in GiB, each of the box that needs most."""
    peaks = (max(box.peak_gib[tier] for box in plan.boxes) for tier in MemoryTier)
    return ", ".join(f"{peak:.3g}" if peak < 1000 else f"{peak:.0f}" for peak in peaks)


def section(*, quick: bool, kept: KeptResults = _NOTHING_KEPT) -> tuple[str, dict[str, float]]:
    """Returns the section's text, and the figures of the last line. `kept`: plans of earlier runs."""
    rows, numbers = (_JOBS[1:2], _NUM_BOXES[:2]) if quick else (_JOBS, _NUM_BOXES)
    page = Page("")
    page.add(
        _SECTION,
        "**All numbers below are planned. None is measured.** Jobs over several boxes have run on one machine only, "
        "whose namespaces, processes or threads stood for the boxes ([decision 51](decisions/0051-stages.md)). *Step* "
        "is simulated: the simulator runs the scheduler's policy, and counts what queues in a box "
        "([decision 55](decisions/0055-simulated-boxes.md)). *By the formula* is the time that the search of plans "
        "uses ([decision 53](decisions/0053-plans-over-boxes.md)). Of the best plans by the formula, the one "
        "with the shortest simulated step is shown. For your model and boxes:",
    )
    page.add_command(
        "windlass plan --model llama-3.1-70b --batch-size 64 --seq-len 1024 --hardware rtx4090-server --boxes 4 "
        "--network 10"
    )
    page.add(
        f"The boxes below are `{_MACHINE}` (12 SSDs, 768 GiB of RAM) with GPUs of 24 GiB, each with a PCIe link of its "
        "own. Jobs on several boxes use all GPUs. A job on one box uses those with which it is fastest. 405B on "
        "two boxes has one group of micro-batches for each GPU: with several, sums would wait in host memory, 4 bytes "
        "a parameter, which is 812 GB in each. So its boxes hardly compute at once, and two may be slower than one. "
        "Training is in bf16 with AdamW's states in fp32, and gradients are clipped. *Bound by* is the "
        "formula's answer. *Waits* is the share of a step in which the busiest box waits for others: it falls with "
        "more groups of micro-batches a step, so with larger batches. *Network busy* is the time in which the busiest "
        "network card sends. All GPUs of a job compute at once, a group each. *Memory* is the peak of the box that "
        "needs most, with the reserves of the driver and of PyTorch's allocator. The RAM also holds activations, as "
        "many as it has room for. The search does not try all divisions of layers, so a better plan may exist.",
        f"![Tokens a second of one job over several boxes](images/{_PICTURE})",
    )
    figures = dict[str, float]()
    for job in itertools.chain.from_iterable(rows):
        figures |= dict(_add_job(page, job, numbers, kept))
    page.add("`python -m benchmarks.stages` writes this section.")
    return page.text.partition(_SECTION)[2], figures


def picture(kept: KeptResults = _NOTHING_KEPT) -> str:
    """Returns the picture of tokens a second over boxes and network. `kept`: plans of earlier runs."""

    def tokens_per_s(job: Job, number: int, rate: float) -> float | None:
        plan = plans_of(job, rate, _NUM_BOXES, kept).get(number)
        return None if plan is None else float(f"{plan.tokens_per_s:.3g}")

    return heat_maps(
        [
            [
                Panel(
                    title=job.in_words,
                    numbers=[[tokens_per_s(job, number, rate) for rate in _GBIT_PER_S] for number in _NUM_BOXES],
                )
                for job in row
            ]
            for row in _JOBS
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
    parser.add_argument("--keep", type=Path, help="folder for finished parts, which another run takes from there")
    options = parser.parse_args()
    kept = KeptResults.in_folder(options.keep, form="quick" if options.quick else "full")
    text, figures = section(quick=options.quick, kept=kept)
    print(_SECTION + text)
    if not options.quick:
        (DOCS / "images" / _PICTURE).write_text(picture(kept))
        path = DOCS / "cluster.md"
        path.write_text(with_section(path.read_text(), text))
    print(json.dumps(rounded(figures)))


if __name__ == "__main__":
    main()
