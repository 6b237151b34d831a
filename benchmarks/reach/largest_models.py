"""The largest model over GPU memory, RAM, batch, clipping and precision of the states: a part of `benchmarks.reach`."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from benchmarks.papers.published.models import RATEL_SHAPES
from benchmarks.reporting.heat_map import Panel, heat_maps
from benchmarks.reporting.page import DOCS, Page
from windlass.engine.training_config import TrainingConfig
from windlass.planner.feasibility import fits, with_part
from windlass.planner.hardware import Hardware, ModelShape, machine_of
from windlass.planner.profiling import ShapeConfig
from windlass.planner.question import PlanQuestion, Profiles
from windlass.storage.ids import StatePrecision

GPU_GIB = (12, 16, 24, 32, 48, 80)
RAM_GIB = (32, 64, 128, 256, 512, 768)
BATCHES = (1, 16)
# Billions of parameters of the models that are tried.
SIZES = (1, 2, 3, 4, 6, 8, 10, 13, 20, 30, 40, 55, 70, 100, 135, 175, 225, 276, 340, 412, 500, 640, 800, 1000)
_NUM_TOKENS = 1024
_MACHINE = "rtx4090-server"
_HEAD_DIM = 128
_PICTURE = "reach.svg"
# GPU and RAM of the table, in GiB.
_BOXES = ((12, 32), (16, 64), (24, 64), (24, 128), (24, 256), (32, 128), (48, 256), (80, 768))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of job, for which there is one table."""

    states: StatePrecision
    clips: bool
    batch_size: int

    @property
    def in_words(self) -> str:
        """The title of its panel."""
        clipping = "clipping" if self.clips else "no clipping"
        return f"states {self.states.value}, {clipping}, batch {self.batch_size}"


def kinds() -> list[list[Kind]]:
    """Returns the kinds of jobs, a row for each precision of the states."""
    return [
        [Kind(states=states, clips=clips, batch_size=size) for clips in (False, True) for size in BATCHES]
        for states in StatePrecision
    ]


def shape_of(billions: int) -> ModelShape:
    """Returns a shape of about this size: one of Ratel's, or one that is as deep and wide as these suggest."""
    if billions in RATEL_SHAPES:
        return RATEL_SHAPES[billions]
    known = sorted(RATEL_SHAPES)
    place = min(max(bisect_left(known, billions), 1), len(known) - 1)
    below, above = known[place - 1], known[place]
    low, high = (math.log(RATEL_SHAPES[size].hidden_size) for size in (below, above))
    share = math.log(billions / below) / math.log(above / below)
    hidden = _HEAD_DIM * max(1, round(math.exp(low + share * (high - low)) / _HEAD_DIM))
    vocab_size = RATEL_SHAPES[below].vocab_size
    num_layers = max(1, round((billions * 1e9 - vocab_size * hidden) / (12 * hidden**2)))
    return ModelShape(num_layers=num_layers, hidden_size=hidden, num_heads=hidden // _HEAD_DIM, vocab_size=vocab_size)


def largest_of(kind: Kind, fits_size: Callable[[Kind, int, int, int], bool]) -> list[list[int]]:
    """Returns the index in `SIZES` of the largest model, plus one: a row for each RAM, a column for each GPU.

    `fits_size` tells whether a job fits: for its kind, an index in `SIZES`, and GiB of GPU and RAM. More memory never
    makes less fit, so a search begins at the result for less memory.
    """
    found: list[list[int]] = []
    for ram_gib in RAM_GIB:
        row: list[int] = []
        for column, gpu_gib in enumerate(GPU_GIB):
            known = max(row[-1] if row else 0, found[-1][column] if found else 0)
            row.append(_search(known, partial(_of_memory, fits_size, kind, gpu_gib, ram_gib)))
        found.append(row)
    return found


def _of_memory(
    fits_size: Callable[[Kind, int, int, int], bool], kind: Kind, gpu_gib: int, ram_gib: int, index: int
) -> bool:
    return fits_size(kind, index, gpu_gib, ram_gib)


def _search(known: int, fits_index: Callable[[int], bool]) -> int:
    """Returns the number of sizes that fit, at least `known`: doubles the step while it fits, then bisects."""
    low, step = known, 1
    while low + step <= len(SIZES) and fits_index(low + step - 1):
        low, step = low + step, 2 * step
    does_not = min(low + step, len(SIZES) + 1)
    while does_not - low > 1:
        middle = (low + does_not) // 2
        low, does_not = (middle, does_not) if fits_index(middle - 1) else (low, middle)
    return low


def machine(*, gpu_gib: int, ram_gib: int) -> Hardware:
    """Returns Ratel's server with its twelve SSDs and other memory."""
    server = machine_of(_MACHINE)
    gpus, host = with_part(server.gpus, memory_gib=float(gpu_gib)), with_part(server.host, memory_gib=float(ram_gib))
    return with_part(server, gpus=gpus, host=host)


def question_of_kind(kind: Kind, billions: int, *, gpu_gib: int, ram_gib: int) -> PlanQuestion:
    """Returns the question whether such a job fits such a machine."""
    return PlanQuestion(
        config=ShapeConfig(shape=shape_of(billions), num_tokens=_NUM_TOKENS),
        hardware=machine(gpu_gib=gpu_gib, ram_gib=ram_gib),
        training=TrainingConfig(
            batch_size=kind.batch_size,
            sequence_length=_NUM_TOKENS,
            state_precision=kind.states,
            clip_norm=1.0 if kind.clips else None,
            total_steps=1,
        ),
        chooses_microbatches=True,
        chooses_cut=True,
    )


def _fits(kind: Kind, index: int, gpu_gib: int, ram_gib: int) -> bool:
    billions = SIZES[index]
    return fits(question_of_kind(kind, billions, gpu_gib=gpu_gib, ram_gib=ram_gib), _profiles(billions))


@cache
def _profiles(billions: int) -> Profiles:
    kind = Kind(states=StatePrecision.FP32, clips=True, batch_size=BATCHES[0])
    return Profiles(question_of_kind(kind, billions, gpu_gib=GPU_GIB[0], ram_gib=RAM_GIB[0]))


def add_largest_models(page: Page) -> Iterator[tuple[str, float]]:
    """Adds the picture and the table, and writes the picture's file. Yields the figures of the last line."""
    tables = {kind: largest_of(kind, _fits) for row in kinds() for kind in row}
    (DOCS / "images" / _PICTURE).write_text(picture(tables))
    page.add(
        "## The largest model over GPU memory and RAM",
        f"For one GPU and this server's twelve SSDs, which limit nothing here: of {len(SIZES)} sizes from {SIZES[0]} "
        "to "
        f"{SIZES[-1]} billion parameters, the largest for which there is a plan. Depth and width are those of Ratel's "
        f"shapes, and between them as these suggest. A step is of 1 or 16 sequences of {_NUM_TOKENS} tokens, and the "
        "planner chooses the micro-batches. *fp32*, *split* and *bf16* are the precisions of the states "
        "(`state_precision`). RAM is what jobs may take.",
        f"![The largest model over GPU memory and RAM](images/{_PICTURE})",
        "The same for some boxes, in billions of parameters: the first number of a pair is for a batch of 1, the "
        "second "
        "for one of 16.",
    )
    rows = []
    for states in StatePrecision:
        for clips in (False, True):
            cells = []
            for gpu_gib, ram_gib in _BOXES:
                pair = []
                for batch_size in BATCHES:
                    found = tables[Kind(states=states, clips=clips, batch_size=batch_size)]
                    size = _size(found[RAM_GIB.index(ram_gib)][GPU_GIB.index(gpu_gib)])
                    pair.append(f"{size:g}" if size else "-")
                    name = f"largest_{states.value}_{'clip' if clips else 'no_clip'}_{batch_size}"
                    yield f"{name}_{gpu_gib}_{ram_gib}", size or 0.0
                cells.append(" / ".join(pair))
            rows.append((states.value, "yes" if clips else "no", *cells))
    page.add_table(("states", "clipping", *(f"GPU {gpu}, RAM {ram} GiB" for gpu, ram in _BOXES)), rows)


def picture(tables: dict[Kind, list[list[int]]]) -> str:
    """Returns the picture of all tables."""
    return heat_maps(
        [
            [
                Panel(title=kind.in_words, numbers=[[_size(each) for each in row] for row in tables[kind]])
                for kind in line
            ]
            for line in kinds()
        ],
        title="The largest model that one GPU trains, billions of parameters (planned, not run)",
        columns=[str(gib) for gib in GPU_GIB],
        rows=[str(gib) for gib in RAM_GIB],
        column_title="GiB of GPU memory",
        row_title="GiB of RAM",
        most=SIZES[-1],
    )


def _size(number: int) -> float | None:
    """Returns the billions of parameters of the largest of so many sizes that fit."""
    return float(SIZES[number - 1]) if number else None
