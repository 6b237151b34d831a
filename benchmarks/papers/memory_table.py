"""Tables of `benchmarks.papers`: the host memory of MemAscend and of windlass."""

from benchmarks.papers.decoder_sizes import block_numels, model_size
from benchmarks.papers.largest_model import least_arena_nbytes
from benchmarks.papers.published.memory import (
    PUBLISHED_GROWTHS,
    PUBLISHED_PEAKS,
    PUBLISHED_SAVINGS,
    growths,
    memascend_memory,
    savings,
    zero_infinity_memory,
)
from benchmarks.reporting.page import Page, compared
from windlass.amounts import GIB
from windlass.engine.memory_plan import make_plan
from windlass.engine.model import choose_chunk_numel
from windlass.planner.hardware import ModelShape

NUM_OPTIMIZERS = 2  # one for each of two sockets


def add_peaks(page: Page) -> float:
    """Adds the peaks of both papers' systems and windlass's arena. Returns the largest error."""
    rows, arenas, errors = [], [], []
    for peak in PUBLISHED_PEAKS:
        theirs, ours = zero_infinity_memory(peak.shape), memascend_memory(peak.shape)
        pairs = ((peak.zero_infinity_gib, theirs.total / GIB), (peak.memascend_gib, ours.total / GIB))
        errors += [abs(computed / published - 1) for published, computed in pairs]
        rows.append((peak.model, *(cell for pair in pairs for cell in compared(*pair))))
        arenas.append((peak.model, *_arenas(peak.shape)))
    page.add(
        "## Host memory",
        "MemAscend's figure 13: peak host memory in GiB, fp16 training, states on SSDs, activations recomputed on the "
        "GPU. Computed by its own accounting: gradients of all parameters in fp32; in ZeRO-Infinity 1.25 times as much "
        "again for the check for overflow, nine buffers for params as large as the embedding, and every pinned buffer "
        "rounded up to a power of two. Two figures that its section V-A prints for Qwen2.5-7B serve all models: the "
        "optimizer's buffers (11 times the embedding in 16 bit), and 1.63 GiB for what remains.",
    )
    page.add_table(
        ("model", "ZeRO-Infinity: published", "computed", "ratio", "MemAscend: published", "computed", "ratio"), rows
    )
    page.add(
        "windlass's arena for the same models in GiB, computed by its planner (bf16, two optimizers, states on SSDs). "
        "It holds no gradients of all parameters unless they must be kept for clipping, and then they can wait on the "
        "SSDs. The first of each pair is what it would take without a budget, the second the smallest budget it can "
        "work in. Ray and windlass's processes take about 1.2 GiB more."
    )
    page.add_table(("model", "no clipping", "at least", "clipping", "at least"), arenas)
    return max(errors)


def add_growths(page: Page) -> None:
    """Adds the growth with activations in host memory, and the savings by each part of MemAscend."""
    rows = []
    for growth in PUBLISHED_GROWTHS:
        theirs, ours = growths(growth)
        start, stop = growth.num_tokens
        what = f"{growth.model}, from {start} to {stop} tokens a GPU"
        rows.append((f"{what}: ZeRO-Infinity, GiB", *compared(round(growth.zero_infinity_gib, 2), theirs / GIB)))
        rows.append((f"{what}: MemAscend, GiB", *compared(round(growth.memascend_gib, 2), ours / GIB)))
    shares = savings()
    rows += [
        (f"saved of ZeRO-Infinity's {name}, percent", *compared(100 * share, 100 * shares[name]))
        for name, share in PUBLISHED_SAVINGS.items()
    ]
    page.add(
        "What longer contexts or larger batches add on two GPUs, where activations between layers go to host memory "
        "(its equation 1 and section VI-B2), and what MemAscend saves on average over the four models:"
    )
    page.add_table(("what", "published", "computed", "ratio"), rows)


def _arenas(shape: ModelShape) -> list[str]:
    numels = block_numels(shape, num_tokens=0)
    size = model_size(numels, chunk_numel=choose_chunk_numel(list(numels)), is_tied=False)
    cells = []
    for keep_grads in (False, True):
        free = make_plan(
            size, num_optimizers=NUM_OPTIMIZERS, grad_itemsize=2, keep_grads=keep_grads, host_memory_nbytes=None
        )
        least = least_arena_nbytes(size, keep_grads=keep_grads, num_optimizers=NUM_OPTIMIZERS)
        cells += [f"{free.arena_nbytes / GIB:.1f}", f"{least / GIB:.1f}"]
    return cells
