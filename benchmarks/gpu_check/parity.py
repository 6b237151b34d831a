"""Checks that windlass computes on this GPU what plain PyTorch computes there.

Algorithms are deterministic. Plain PyTorch trains three times: twice alike, and once with the examples of each step in
reverse order. The last differs from the first by rounding alone. This difference, or that of the first two if it is
larger, is the noise floor. Windlass may differ from the first by a small multiple of it, in losses and in params.

Released buffers are filled with NaN. If a stream reads a buffer too early, or fills it too early, the loss becomes NaN.
With more operations in flight, the streams run further behind.

Most variants compute with torch's usual kernels, as plain PyTorch does. One variant has all others that are available
here, and a sliced head. The run that it is compared with has the same kernels for norms, MLPs and attention. It
computes the loss, and the gradient of the head's projection, in fp32.
"""

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.activations.memory_need import room_for_activations
from benchmarks.gpu_check.case import Setting, in_short
from benchmarks.gpu_check.cases import ParityCase
from benchmarks.gpu_check.watch import HostWaits, host_waits
from benchmarks.peers.contenders import SHM_DIR
from tests.support.reference_loop import PlainRun, train_plainly
from tests.support.training import (
    VOCABULARY,
    boxes_of,
    exported_params,
    has_direct_io,
    losses_of,
    make_model,
    make_partition,
    make_spec,
    metrics_of,
)
from windlass.actors.job import JobSpec
from windlass.actors.messages import ComputeProgressed, Message, ModelKernelsChosen, Phase
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.worker_policy import Ordering, Stage
from windlass.amounts import GIB
from windlass.engine.device import TORCH_DTYPE
from windlass.engine.memory_plan import ActivationChoice, Placement
from windlass.engine.model import build_meta_model, kernels_here, load_config
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import ActorName, Kernel, ModelKernel, Precision

PLACES = ("SSD", "host", "device")
_NUM_STEPS = 30
_NUM_TINY_STEPS = 2
# Largest difference, as a multiple of the noise floor. Differences of one size are spread this widely.
FLOOR_FACTOR = 8.0
_EPSILON = 2.0**-23  # smallest noise floor: a unit in the last place of an fp32 number
# Smallest noise floor of params: one in 2^16 differs by a unit in the last place.
_LEAST_PARAMS = {Precision.FP32: _EPSILON, Precision.BF16: 2.0 ** (-8 - 8), Precision.FP16: 2.0 ** (-11 - 8)}
# Choices for activations, and whether swapped ones go to the SSDs.
ACTIVATIONS = (*((choice, False) for choice in ActivationChoice), (ActivationChoice.SWAP, True))
_ENOUGH_S = 480.0  # no further variant begins
# Device memory budget of each variant, so that the worker counts its need and limits the allocator.
_BUDGET_NBYTES = 2 * GIB
# Tokens of a slice of the head, and of a piece of its loss, where the head has slices. A micro-batch has up to 192.
_SLICE_TOKENS, _PIECE_TOKENS = 64, 24
_PRODUCT_ROWS = 32  # of the part of a slice's gradient that is made at once

# Largest number of elements of a part of a matrix, where matrices are cut. A layer's have 2048 to 8192.
_CUT_NUMEL = 1800

# Micro-batches, tied, kernels of the model, largest norm.
_Settings = tuple[int, bool, tuple[ModelKernel, ...], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The settings of one run that is compared with plain PyTorch."""

    precision: Precision
    activations: ActivationChoice
    swaps_to_ssd: bool
    place: str  # tier of the model states
    num_microbatches: int
    is_tied: bool
    kernel: Kernel | None  # None: compiled if there is a compiler
    num_ahead: int  # operations in flight
    is_streamed: bool = False  # layers are copied to the device in pieces, and their gradients leave it in pieces
    is_sliced: bool = False  # the head goes over several slices of tokens
    model_kernels: tuple[ModelKernel, ...] = ()  # on both sides; empty: torch's own
    lanes: int = 1
    num_ranks: int = 1  # GPU workers of a box
    num_boxes: int = 1
    group_size: int | None = None
    clip_norm: float | None = None
    cut_matrices: int | None = None

    @property
    def reference(self) -> _Settings:
        """The settings that change what is computed."""
        return self.num_microbatches, self.is_tied, self.model_kernels, self.clip_norm

    @property
    def described(self) -> str:
        """Description for a person, printed before the variant runs."""
        parts = [f"activations {self.activations}", f"states on {self.place}", f"{self.num_microbatches} micro-batches"]
        parts += [f"updates {self.kernel or Kernel.COMPILED}"]
        parts += ["streamed"] * self.is_streamed + ["a sliced head"] * self.is_sliced + list(self.model_kernels)
        parts += [f"{self.lanes} lanes"] * (self.lanes > 1) + [f"{self.num_ranks} workers"] * (self.num_ranks > 1)
        parts += [f"{self.num_boxes} boxes"] * (self.num_boxes > 1) + ["clipped"] * (self.clip_norm is not None)
        parts += ["cut matrices"] * (self.cut_matrices is not None)
        return ", ".join(parts)

    def placed(self, spec: JobSpec, num_blocks: int, device: str) -> JobSpec:
        """Returns the job with the variant's placement."""
        blocks = tuple(range(num_blocks))
        placement = Placement(
            host_blocks=blocks if self.place == "host" else (),
            device_blocks=blocks if self.place == "device" else (),
            streamed_blocks=blocks[1:-1] if self.is_streamed else (),
            streams_grads=self.is_streamed,
            group_size=self.group_size,
            activations=self.activations.of_layers(num_blocks - 2),
        )
        nbytes = room_for_activations(spec, placement, device)
        placement = dataclasses.replace(
            placement,
            host_activation_nbytes=0 if self.swaps_to_ssd else nbytes,
            ssd_activation_nbytes=nbytes if self.swaps_to_ssd else 0,
        )
        return dataclasses.replace(spec, placement=placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Relative differences of two runs."""

    loss: float  # the largest of any step
    params: float  # norm of the difference over the norm, at the end

    def is_within(self, floor: "Differences", precision: Precision) -> bool:
        """Checks that both are at most a small multiple of the noise floor."""
        loss, params = max(floor.loss, _EPSILON), max(floor.params, _LEAST_PARAMS[precision])
        return self.loss <= FLOOR_FACTOR * loss and self.params <= FLOOR_FACTOR * params

    @classmethod
    def largest(cls, several: Sequence["Differences"]) -> "Differences":
        """Returns the largest loss and params of several."""
        return cls(
            loss=max((each.loss for each in several), default=0.0),
            params=max((each.params for each in several), default=0.0),
        )


def variants(precision: Precision, *, compiles: bool) -> list[Variant]:
    """Returns every choice for activations. The other settings vary from one to the next, and over the precisions.

    Then follow the same choices with streamed layers, where states are on the SSDs, and one with a sliced head. Further
    ones have cut matrices. With `compiles`, the last has a kernel compiled for the device.
    """
    first = list(Precision).index(precision) * len(ACTIVATIONS)
    plain = [
        # Over all precisions, each choice for activations meets every place, and both values of every other setting.
        Variant(
            precision=precision,
            activations=activations,
            swaps_to_ssd=swaps_to_ssd,
            place=PLACES[i % 3],
            num_microbatches=(1, 4)[i % 2],
            is_tied=i // 2 % 2 == 1,
            kernel=Kernel.FUSED,
            num_ahead=(2, 5)[i // len(ACTIVATIONS) % 2],
        )
        for i, (activations, swaps_to_ssd) in enumerate(ACTIVATIONS, start=first)
    ]
    streamed = [dataclasses.replace(each, is_streamed=True) for each in plain if each.place == "SSD"]
    compiled = dataclasses.replace(plain[0], place="device", kernel=None, num_microbatches=1)
    sliced = dataclasses.replace(plain[0], is_sliced=True, num_microbatches=1)
    cut = [dataclasses.replace(each, cut_matrices=_CUT_NUMEL) for each in (plain[0], *streamed)]
    return [*plain, *streamed, sliced, *cut, *([compiled] if compiles else [])]


def several(precision: Precision) -> list[Variant]:
    """Returns variants with lanes, several GPU workers and several boxes, whole and in pieces.

    The first has none of them, but one micro-batch, whose sums the noise floor needs.
    """
    plain = Variant(
        precision=precision,
        activations=ActivationChoice.RECOMPUTE,
        swaps_to_ssd=False,
        place="SSD",
        num_microbatches=4,
        is_tied=False,
        kernel=Kernel.FUSED,
        num_ahead=2,
    )
    streamed = dataclasses.replace(plain, is_streamed=True)
    return [
        dataclasses.replace(plain, num_microbatches=1),
        dataclasses.replace(plain, lanes=2),
        dataclasses.replace(streamed, lanes=2, clip_norm=0.5),
        dataclasses.replace(plain, num_ranks=2, activations=ActivationChoice.SWAP),
        dataclasses.replace(streamed, num_ranks=2, group_size=1),
        dataclasses.replace(streamed, lanes=4, num_ranks=2, group_size=2, is_tied=True),
        dataclasses.replace(streamed, lanes=4, num_ranks=4, clip_norm=0.5),
        dataclasses.replace(plain, num_boxes=2),
        dataclasses.replace(streamed, num_boxes=2, num_ranks=2, lanes=2, clip_norm=0.5, is_tied=True),
    ]


def measure(case: ParityCase, setting: Setting) -> dict[str, Any]:
    """Compares all variants of a precision. A failed variant does not stop the others."""
    references: dict[_Settings, _Reference] = {}
    compiles = not setting.is_tiny
    listed = several(case.precision) if case.has_several else variants(case.precision, compiles=compiles)
    if not case.has_several and (kernels := _kernels_here(case.precision, setting)):
        # FlashAttention 2 needs several examples in a micro-batch, and the head's product several micro-batches.
        listed.append(dataclasses.replace(listed[0], model_kernels=kernels, num_microbatches=2, is_sliced=True))
    with _deterministic(setting.device):
        runs = list(_compared(listed, setting, references))
    repeated, floor = _noise(references, ())
    found: list[Differences] = []
    for run in runs:
        if (difference := run["difference"]) is not None:
            found.append(difference)
            _, floor_here = _noise(references, run["model_kernels"])
            run["is_wrong"] |= not difference.is_within(floor_here, case.precision)
            run["difference"] = asdict(difference)
    largest = Differences.largest(found)
    return {
        "loss_difference_max": largest.loss if found else None,
        "param_difference_max": largest.params if found else None,
        "repeated": asdict(repeated),
        "floor": asdict(floor),
        "num_wrong": sum(run["is_wrong"] for run in runs),
        "runs": runs,
    }


def _noise(
    references: Mapping[_Settings, "_Reference"], model_kernels: tuple[ModelKernel, ...]
) -> tuple[Differences, Differences]:
    """Returns the largest difference of repetitions with the given kernels, and their noise floor."""
    same = [each for (_, _, kernels, _), each in references.items() if kernels == model_kernels]
    repeated = Differences.largest([each.repeated for each in same])
    return repeated, Differences.largest([repeated, *(each.other_order for each in same)])


def _kernels_here(precision: Precision, setting: Setting) -> tuple[ModelKernel, ...]:
    """Returns the kernels that a job could use here, besides torch's usual ones."""
    model = build_meta_model(load_config(make_model(setting.root / f"model-{precision}")), precision)
    return kernels_here(model, precision, torch.device(setting.device))


@contextlib.contextmanager
def _sliced_head() -> Iterator[None]:
    """Lets the head go over small slices in its context, and over parts of each slice's loss and gradient."""
    small = (
        (slice_sizes, "MIN_SLICE_TOKENS", _SLICE_TOKENS),
        (slice_sizes, "MAX_SLICE_TOKENS", _SLICE_TOKENS),
        (slice_sizes, "MAX_PIECE_NUMEL", _PIECE_TOKENS * VOCABULARY),
        (slice_sizes, "MAX_PRODUCT_NUMEL", 1),
        (slice_sizes, "ROWS_UNIT", _PRODUCT_ROWS),
    )
    usual = [(module, name, getattr(module, name)) for module, name, _ in small]
    for module, name, value in small:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in usual:
            setattr(module, name, value)


@contextlib.contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """Makes torch choose deterministic kernels. What has none is warned of, and raises the noise floor."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else each new tensor is filled, which jobs do not do.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Reference:
    """Plain PyTorch's run, and its differences from a repetition and from another order of the sums."""

    plain: PlainRun
    repeated: Differences
    other_order: Differences


def _compared(
    listed: Sequence[Variant], setting: Setting, references: dict[_Settings, _Reference]
) -> Iterator[dict[str, Any]]:
    """Runs each variant, and plain PyTorch for each new combination of what is computed."""
    until_s = time.monotonic() + _ENOUGH_S
    for index, variant in enumerate(listed):
        start_s, folder = time.monotonic(), setting.root / f"parity-{variant.precision}-{index}"
        print(f"  variant {index + 1} of {len(listed)}: {variant.described}", flush=True)
        run: dict[str, Any] = {**asdict(variant), "difference": None, "is_wrong": False, "reason": ""}
        if start_s > until_s:
            yield run | {"reason": "no time is left"}
            continue
        try:
            with host_waits(setting.device) as waits:
                spec = _train(variant, folder, setting, waits)
            if variant.reference not in references:
                references[variant.reference] = _reference(spec, setting.device)
            reference = references[variant.reference]
            difference = differences_of(losses_of(spec), exported_params(spec), reference.plain, variant.precision)
            run |= {
                "difference": difference,
                "swapped_nbytes": _swapped_nbytes(variant, spec),
                "host_waits": waits.number,
                "host_waits_by_line": dict(waits.by_line),
                "is_wrong": waits.number > 0,
            }
        except Exception as error:  # noqa: BLE001 - a variant fails alone
            run |= {"is_wrong": True, "reason": in_short(error)}
        shutil.rmtree(folder, ignore_errors=True)
        yield run | {"took_s": time.monotonic() - start_s}


def _reference(spec: JobSpec, device: str) -> _Reference:
    plain, repeated = train_plainly(spec, device), train_plainly(spec, device)
    other_order = train_plainly(spec, device, is_reversed=True)
    precision = spec.training.precision
    return _Reference(
        plain,
        differences_of(repeated.losses, repeated.params, plain, precision),
        differences_of(other_order.losses, other_order.params, plain, precision),
    )


def _train(variant: Variant, folder: Path, setting: Setting, waits: HostWaits) -> JobSpec:
    """Trains a variant and returns its job. Raises RuntimeError if it fails, or is computed with other kernels."""
    spec = make_spec(
        folder,
        tied=variant.is_tied,
        precision=variant.precision,
        num_microbatches=variant.num_microbatches,
        kernel=variant.kernel,
        kernel_dir=str(setting.root / "kernels"),
        total_steps=_NUM_TINY_STEPS if setting.is_tiny else _NUM_STEPS,
        evaluate_every=None,
        num_validation_examples=0,
        ordering=Ordering(max_prefetched=variant.num_ahead),
        model_kernels=variant.model_kernels,
        device_memory_nbytes=_BUDGET_NBYTES,
        lanes=variant.lanes,
        num_ranks=variant.num_ranks,
        clip_norm=variant.clip_norm,
        cut_matrices=variant.cut_matrices,
    )
    partition = make_partition(spec)
    num_blocks = len(partition.layout.blocks)
    spec = variant.placed(spec, num_blocks, setting.device)
    chosen: tuple[ModelKernel, ...] = ()

    def look(_: ActorName, message: Message) -> None:
        nonlocal chosen
        turn_on_after_second_step(waits, message)
        if isinstance(message, ModelKernelsChosen):
            chosen = message.kernels

    with contextlib.ExitStack() as during:
        if variant.is_sliced:
            during.enter_context(_sliced_head())
        boxes = [spec]
        if variant.num_boxes > 1:
            boxes = boxes_of(spec, _stages(num_blocks, variant.num_boxes))
            # The boxes' arenas have one name. CUDA registers only memory.
            folders = [during.enter_context(TemporaryDirectory(dir=SHM_DIR)) for _ in boxes]
            boxes = [dataclasses.replace(box, arena_dir=path) for box, path in zip(boxes, folders, strict=True)]
        outcome = run_local(
            boxes[0],
            other_boxes=boxes[1:],
            partition=partition,
            device=setting.device,
            poison_released=True,
            direct=has_direct_io(folder),
            on_message=look,
        )
    if outcome["status"] != "succeeded":
        raise RuntimeError(outcome["error"]["message"])
    if chosen != variant.model_kernels:
        raise RuntimeError(f"the model was computed with {chosen}, plain PyTorch's with {variant.model_kernels}")
    return spec


def _stages(num_blocks: int, number: int) -> tuple[Stage, ...]:
    """Divides all blocks evenly."""
    edges = [num_blocks * i // number for i in range(number + 1)]
    return tuple(starmap(Stage, pairwise(edges)))


def turn_on_after_second_step(waits: HostWaits, message: Message) -> None:
    """Lets the host's waits be counted from the third step on, because the first two set things up."""
    computed = message.computed if isinstance(message, ComputeProgressed) else ()
    if any((each.phase, each.step) == (Phase.HEAD, 2) for each in computed):
        waits.turn(on=True)


def differences_of(
    losses: Sequence[float], params: dict[str, torch.Tensor], plain: PlainRun, precision: Precision
) -> Differences:
    """Returns the differences of a run from plain PyTorch's. Raises RuntimeError if a loss is not finite."""
    if not all(map(math.isfinite, (*losses, *plain.losses))):
        raise RuntimeError(f"losses are not finite: {list(losses)}, and plain PyTorch's: {plain.losses}")
    squares = apart = 0.0
    for name, param in params.items():
        # A model is exported in its precision.
        ours, theirs = (each.detach().to(TORCH_DTYPE[precision]).double() for each in (param, plain.params[name]))
        apart += float((ours - theirs).square().sum())
        squares += float(theirs.square().sum())
    return Differences(
        loss=max(abs(a - b) / abs(b) for a, b in zip(losses, plain.losses, strict=True)),
        params=math.sqrt(apart / squares),
    )


def _swapped_nbytes(variant: Variant, spec: JobSpec) -> int:
    """Returns the bytes of activations that left the device in the last step.

    Raises RuntimeError if they do not match the choice.
    """
    nbytes = int(list(metrics_of(spec, "activation_bytes_out").values())[-1])
    if (nbytes > 0) != any(choice.swaps for choice in spec.placement.activations):
        raise RuntimeError(f"{nbytes} bytes of activations left the device, with the choice {variant.activations}")
    return nbytes
