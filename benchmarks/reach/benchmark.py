"""Computes the largest models and the step times by the planner's model: `python -m benchmarks.reach [--quick]`

Nothing is measured, so the page is the same on every machine. The full form takes minutes and writes docs/reach.md.
"""

from collections.abc import Iterator
from functools import cache

from benchmarks.papers.published.models import RATEL_SHAPES
from benchmarks.reach.largest_models import add_largest_models
from benchmarks.reporting.page import Page, write_page
from windlass.amounts import GIB
from windlass.engine.training_config import TrainingConfig
from windlass.planner.feasibility import fits, with_part
from windlass.planner.hardware import Hardware, example_machines, load
from windlass.planner.planning.planner import planned
from windlass.planner.planning.simulated_search import fastest_plan
from windlass.planner.profiling import ShapeConfig
from windlass.planner.question import PlanQuestion, PlanReport, Profiles

_MACHINE = "rtx4090-server"
_NUM_EXAMPLES, _NUM_TOKENS = 32, 1024
_RAM_GIB = (32, 64, 128, 256)
_FEW_SSDS, _MOST_SSDS = 2, 12  # numbers of SSDs in the table of largest models
_NUM_SSDS = (1, 2, 4, 6, 8, 12)
_RAM_OF_SSDS_GIB = 128
_SIZES_OVER_SSDS = (13, 70)  # billions of parameters
# Models of Ratel's figure 6: billions of parameters, GiB of GPU memory, GB of RAM.
_RATELS = ((175, 16, 256), (276, 24, 768))


def machine(*, ram_gib: float, num_ssds: int) -> Hardware:
    """Returns Ratel's server with other numbers of RAM and SSDs. The SSDs' combined limit stays."""
    server = load(Hardware, example_machines()[_MACHINE])
    host, ssds = with_part(server.host, memory_gib=float(ram_gib)), with_part(server.ssds, count=num_ssds)
    return with_part(server, host=host, ssds=ssds)


def page(quick: bool) -> tuple[str, dict[str, float]]:
    """Returns the page's text, and the figures of the last line."""
    text = Page("What windlass can do, by its planner's model")
    text.add(
        f"Predictions of the planner's model ([planning](planning.md)), not measurements: plans for Ratel's server, an "
        f"RTX 4090 of 24 GiB with up to {_MOST_SSDS} SSDs (`{_MACHINE}`), and for its shapes (its table IV). A step is "
        f"of {_NUM_EXAMPLES} sequences of {_NUM_TOKENS} tokens, in bf16 with AdamW's states in fp32, gradients "
        "clipped; the planner chooses micro-batches, tiers and activations. Nothing here was run.",
        "`python -m benchmarks.reach` writes this page. How many layers keep optimizer states on the GPU over its "
        "memory is among the [papers' tables](papers.md#states-on-the-gpu).",
    )
    figures = {}
    if not quick:
        figures = dict(add_largest_models(text)) | dict(_add_largest(text)) | dict(_add_ratels(text))
    text.add(
        "## Step time over the number of SSDs",
        f"With {_RAM_OF_SSDS_GIB} GiB of RAM. All SSDs together do at most 32 GB/s there, as Ratel says of its twelve.",
    )
    for size in _SIZES_OVER_SSDS[:1] if quick else _SIZES_OVER_SSDS:
        figures |= dict(_add_ssds(text, size))
    return text.text, figures


def _add_largest(text: Page) -> Iterator[tuple[str, float]]:
    text.add(
        "## The largest model on one GPU of 24 GiB",
        "The largest of Ratel's eight shapes, 6 to 412 billion parameters, for which there is a plan: for a step of "
        f"one sequence, and of {_NUM_EXAMPLES}, of which gradients are summed in fp32. SSDs hold 28 bytes of states a "
        f"parameter, as a step never overwrites the one before it: {_FEW_SSDS} of them, of 3576 GiB, are full sooner "
        "than memory is.",
    )
    rows = []
    for num_ssds in (_FEW_SSDS, _MOST_SSDS):
        for ram_gib in _RAM_GIB:
            hardware = machine(ram_gib=ram_gib, num_ssds=num_ssds)
            one = _largest(hardware, batch_size=1)
            size = _largest(hardware, batch_size=_NUM_EXAMPLES)
            yield f"largest_{ram_gib}_gib_{num_ssds}_ssds", size
            yield f"largest_{ram_gib}_gib_{num_ssds}_ssds_batch_1", one
            head = (f"{ram_gib} GiB", str(num_ssds), f"{one}B" if one else "none")
            rows.append(
                (*head, f"{size}B", *_cells(_report(_question(size, hardware), size)))
                if size
                else (*head, "none", *"-----")
            )
    text.add_table(("RAM", "SSDs", "largest, batch of 1", f"batch of {_NUM_EXAMPLES}", *_COLUMNS), rows)


def _add_ratels(text: Page) -> Iterator[tuple[str, float]]:
    text.add(
        "## What Ratel trains at most",
        f"Its figure 6, by this planner: with {_MOST_SSDS} SSDs, a step of one sequence.",
    )
    rows = []
    for size, gpu_gib, ram_gb in _RATELS:
        hardware = machine(ram_gib=ram_gb * 1e9 / GIB, num_ssds=_MOST_SSDS)
        hardware = with_part(hardware, gpus=with_part(hardware.gpus, memory_gib=float(gpu_gib)))
        question = _question(size, hardware).changed(batch_size=1)
        there_is = fits(question, _profiles(size))
        yield f"fits_{size}b_{gpu_gib}_gib_gpu_{ram_gb}_gb_ram", float(there_is)
        cells = _cells(_report(question, size)) if there_is else "-----"
        rows.append((f"{size}B", f"{gpu_gib} GiB", f"{ram_gb} GB", "yes" if there_is else "no", *cells))
    text.add_table(("model", "GPU", "RAM", "there is a plan", *_COLUMNS), rows)


def _largest(hardware: Hardware, *, batch_size: int) -> int:
    """Returns the largest of the shapes that fits, in billions of parameters, or 0."""
    for size in sorted(RATEL_SHAPES, reverse=True):
        if fits(_question(size, hardware).changed(batch_size=batch_size), _profiles(size)):
            return size
    return 0


def _add_ssds(text: Page, size: int) -> Iterator[tuple[str, float]]:
    rows = []
    for num_ssds in _NUM_SSDS:
        hardware = machine(ram_gib=_RAM_OF_SSDS_GIB, num_ssds=num_ssds)
        if not fits(_question(size, hardware), _profiles(size)):
            rows.append((f"{size}B", str(num_ssds), "does not fit", *"----"))
            continue
        report = _report(_question(size, hardware), size)
        assert report.step_s is not None, "it fits"
        yield f"step_s_{size}b_{num_ssds}_ssds", report.step_s
        rows.append((f"{size}B", str(num_ssds), *_cells(report)))
    text.add_table(("model", "SSDs", *_COLUMNS), rows)


@cache
def _profiles(size: int) -> Profiles:
    return Profiles(_question(size, machine(ram_gib=_RAM_GIB[-1], num_ssds=_MOST_SSDS)))


def _question(size: int, hardware: Hardware) -> PlanQuestion:
    return PlanQuestion(
        config=ShapeConfig(shape=RATEL_SHAPES[size], num_tokens=_NUM_TOKENS),
        hardware=hardware,
        training=TrainingConfig(batch_size=_NUM_EXAMPLES, sequence_length=_NUM_TOKENS, total_steps=1),
        chooses_microbatches=True,
        chooses_cut=True,
    )


def _report(question: PlanQuestion, size: int) -> PlanReport:
    job, solution, step_s = fastest_plan(question, _profiles(size))
    return planned(question, job, solution, _profiles(size), step_s=step_s).report


_COLUMNS = ("step, s", "tokens a second", "model's TFLOPS", "busiest", "RAM, GiB")


def _cells(report: PlanReport) -> tuple[str, ...]:
    assert report.step_s is not None, "it fits"
    assert report.tokens_per_s is not None
    assert report.tflops is not None
    assert report.peak_gib is not None
    # Three digits, never in scientific notation.
    numbers = [f"{float(f'{each:.3g}'):g}" for each in (report.step_s, report.tokens_per_s, report.tflops)]
    return (*numbers, str(report.bottleneck), f"{report.peak_gib['host']:.0f}")


def main() -> None:
    """Writes docs/reach.md, or prints the short page."""
    write_page("reach", __doc__, page, quick_help="one model over the number of SSDs")
