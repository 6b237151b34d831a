"""Tables of `benchmarks.papers`: the largest models, and the number of layers with states on the GPU."""

from benchmarks.papers.decoder_sizes import block_numels, gpt_profile
from benchmarks.papers.largest_model import (
    BareModel,
    autohete_resident_layers,
    device_memory,
    fits,
    least_arena_nbytes,
    most_resident_layers,
)
from benchmarks.papers.memory_table import NUM_OPTIMIZERS
from benchmarks.papers.published.models import (
    AUTOHETE_RESIDENT,
    AUTOHETE_SHAPES,
    PUBLISHED_LARGEST,
    RATEL_SHAPES,
)
from benchmarks.reporting.page import Page, compared
from windlass.amounts import GB, GIB
from windlass.engine.memory_plan import MAX_GRAD_BUFFERS
from windlass.engine.model import choose_chunk_numel
from windlass.engine.slices import num_slice_tokens
from windlass.planner.hardware import Hardware, ModelShape, example_machines, load
from windlass.storage.ids import HeadSlices

_NUM_TOKENS = 1024
_PROCESSES_NBYTES = int(1.2 * GIB)  # Ray and windlass's processes, measured: README.md
_HOST_GB = (64, 128, 256, 768)
_DEVICE_GIB = (12, 16, 20, 24, 32, 40)
_BATCH_SIZES = (8, 16)


def bare_model(shape: ModelShape, *, is_tied: bool, num_examples: int = 1) -> BareModel:
    """Returns the model with the chunks that windlass would choose."""
    numels = block_numels(shape, num_tokens=_NUM_TOKENS, is_tied=is_tied)
    profile = gpt_profile(
        shape,
        num_examples=num_examples,
        num_tokens=_NUM_TOKENS,
        chunk_numel=choose_chunk_numel(list(numels)),
        is_tied=is_tied,
    )
    num_head_tokens = num_slice_tokens(HeadSlices.LARGE, shape.vocab_size)
    return BareModel(shape=shape, profile=profile, num_head_tokens=num_head_tokens)


def largest(
    *,
    host_gb: float,
    device_gib: float,
    is_tied: bool,
    keep_grads: bool = False,
    num_grad_buffers: int = 1,
) -> int:
    """Returns the largest of Ratel's shapes that windlass can train, in billions of parameters; 0: none."""
    ssds = load(Hardware, example_machines()["rtx4090-server"]).ssds
    return max(
        (
            size
            for size, shape in RATEL_SHAPES.items()
            if fits(
                bare_model(shape, is_tied=is_tied),
                device_nbytes=int(device_gib * GIB),
                host_nbytes=int(host_gb * GB) - _PROCESSES_NBYTES,
                ssd_nbytes=int(ssds.count * ssds.capacity_gib * GIB),
                keep_grads=keep_grads,
                num_optimizers=NUM_OPTIMIZERS,
                num_grad_buffers=num_grad_buffers,
            )
        ),
        default=0,
    )


def add_largest(page: Page) -> dict[str, float]:
    """Adds the largest shapes by memory. Returns the figures of the last line."""
    page.add(
        "## Largest models",
        f"Ratel's shapes (its table IV), batch 1 x {_NUM_TOKENS}, the server's twelve SSDs. What windlass itself would "
        "allocate: on the GPU buffers for params (layers whole, or in pieces where they do not fit), gradients, one "
        "layer's activations, logits and half a GiB for CUDA; in host memory its arena and 1.2 GiB of processes. "
        "Whether embedding and head are one matrix (tied) matters on the GPU: a tied one has three sums there.",
    )
    rows: list[tuple[str, ...]] = []
    for published in PUBLISHED_LARGEST:
        for is_tied in (False, True):
            billions = largest(host_gb=published.host_gb, device_gib=published.device_gib, is_tied=is_tied)
            rows.append(
                (
                    f"{published.host_gb} GB of RAM, {published.device_gib} GiB GPU",
                    "tied" if is_tied else "two matrices",
                    *compared(published.billions, billions, 0),
                )
            )
    page.add_table(("machine", "embedding and head", "Ratel, published, B", "windlass, computed, B", "ratio"), rows)
    page.add(
        "Host memory is not what limits windlass here, nor are the SSDs. The largest shape by RAM, embedding and head "
        "two matrices: with one buffer on the GPU for layers' gradients, as windlass plans where more do not fit, and "
        f"with {MAX_GRAD_BUFFERS}, of which one is summed while the other is copied out:"
    )
    rows = []
    for host_gb in _HOST_GB:
        cells = [
            f"{largest(host_gb=host_gb, device_gib=device_gib, is_tied=False, keep_grads=clips, num_grad_buffers=num)}"
            for device_gib in (16, 24)
            for clips, num in ((False, 1), (True, 1), (False, MAX_GRAD_BUFFERS))
        ]
        rows.append((f"{host_gb} GB", *cells))
    kinds = ("", ", clipping", f", {MAX_GRAD_BUFFERS} buffers")
    page.add_table(("RAM", *(f"{device} GiB GPU{kind}" for device in (16, 24) for kind in kinds)), rows)
    page.add("Where the bytes are, in GiB, layers in pieces, and the smallest arena there is a plan for, layers whole:")
    rows = []
    for size in (135, 175, 276, 412):
        for is_tied in (False, True):
            model = bare_model(RATEL_SHAPES[size], is_tied=is_tied)
            parts = device_memory(model, streams_layers=True)
            one = device_memory(model, streams_layers=True, num_grad_buffers=1)
            least = least_arena_nbytes(model.size, keep_grads=False, num_optimizers=NUM_OPTIMIZERS)
            nbytes = (parts.params, parts.grads + parts.matrix_grad, parts.activations, parts.total, one.total, least)
            rows.append((f"{size}B{', tied' if is_tied else ''}", *(f"{each / GIB:.1f}" for each in nbytes)))
    header = ("params", "gradients", "activations, logits", "on the GPU", "with one gradient buffer", "least arena")
    page.add_table(("model", *header), rows)
    return {
        f"largest_at_{published.host_gb}_gb{suffix}": largest(
            host_gb=published.host_gb, device_gib=published.device_gib, is_tied=is_tied
        )
        for suffix, is_tied in (("", False), ("_tied", True))
        for published in PUBLISHED_LARGEST
    }


def add_resident(page: Page) -> None:
    """Adds the number of layers whose states fit on the GPU."""
    page.add(
        "## States on the GPU",
        "How many layers can have their optimizer states on the GPU over its memory: AutoHete's memory model (its "
        "equation 1, every layer recomputed) and windlass's own bytes, both computed, for the two models of its figure "
        f"8 (tables: 4B has {AUTOHETE_SHAPES[4].num_layers} layers, 6B {AUTOHETE_SHAPES[6].num_layers}). The batch is "
        "not printed there; its runs on two nodes have 16.",
    )
    rows = []
    for size, shape in AUTOHETE_SHAPES.items():
        for batch_size in _BATCH_SIZES:
            model = bare_model(shape, is_tied=True, num_examples=batch_size)
            for name, resident in (("AutoHete", autohete_resident_layers), ("windlass", most_resident_layers)):
                numbers = [resident(model, gib * GIB) for gib in _DEVICE_GIB]
                cells = ["does not fit" if number is None else str(number) for number in numbers]
                rows.append((f"{size}B, batch {batch_size}", name, *cells))
    page.add_table(("model", "by", *(f"{gib} GiB" for gib in _DEVICE_GIB)), rows)
    page.add(
        f"Published: {AUTOHETE_RESIDENT} layers of the 4B model, on a GPU of 40 GB. For a layer that stays AutoHete's "
        "equation counts 14 bytes a parameter, and outside of the layers all logits at once; windlass takes 14 as "
        "well, 12 of states and 2 of gradients, which stay until the update, but no copy of the params in 16 bits (its "
        "footnote 2), and has logits in slices. So it has room for as many layers with small batches, and for more "
        "with large ones."
    )
