"""AdamW and Adam on a chunk, in place and in one pass over memory, on states of any precision.

Two kernels do the same. COMPILED is plain PyTorch (`optimizer_formulas`) compiled ahead of time, see `kernel_cache`; it
runs at the speed of memory and leaves Python's lock alone. FUSED is torch's own fused kernel, slice by slice, for
machines without a C++ compiler. Their results differ in the last bit, so a job keeps to the one it began with.

Measured on two cores, 32 Mi elements in an arena, gradients in bf16. COMPILED moves 1.1 to 1.3 times the bytes a second
of memcpy on fp32 states, 1.2 to 1.5 on split ones, 1.0 to 1.5 on bf16 ones; a pass that only adds is 4 percent faster
on fp32 states. FUSED, on one core and where the C library keeps memory from slice to slice, takes 1.3 times as long on
fp32 states, 5 times on split ones, 10 times on bf16 ones; more threads help it little.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from windlass.engine.optimizer.adam_formulas import AdamSettings, Format, Scalar, pair_words, scalars_of
from windlass.engine.optimizer.fused_adam import FusedUpdate
from windlass.engine.optimizer.kernel_cache import KernelUnavailable, load_kernel
from windlass.engine.optimizer.stochastic_rounding import NUMEL_PER_KEY, rounding_keys
from windlass.storage.ids import Kernel, StatePrecision

__all__ = ["AdamSettings", "ChunkStates", "Kernel", "KernelUnavailable", "OptimizerKernel", "WrongStates"]

_logger = logging.getLogger(__name__)

# A compiled kernel takes two words or more, so shorter ranges and odd ends go through a scratch of this many elements.
_SCRATCH_NUMEL = 4
_ALIGNMENT_NBYTES = 8


@dataclass(slots=True, kw_only=True)
class ChunkStates:
    """Views of one chunk's states: contiguous, of one length, each beginning at a multiple of 8 bytes.

    States in fp32: master, and param where the model computes in 16 bits. Split: param and residual. bf16: param alone.
    """

    grad: torch.Tensor  # bf16, fp16 or fp32
    exp_avg: torch.Tensor  # fp32, or bf16 where the states are
    exp_avg_sq: torch.Tensor  # as exp_avg; of a split master its signs mark ties, see `split_master`
    param: torch.Tensor | None = None  # bf16 or fp16
    master: torch.Tensor | None = None  # fp32
    residual: torch.Tensor | None = None  # int16


class WrongStates(ValueError):
    """The tensors of a chunk are not those that the kernel was made for."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements of a chunk that one call updates; even start where elements are taken in pairs."""

    start: int
    stop: int
    decay: float  # weight decay of the even elements, or of all
    odd_decay: float


class OptimizerKernel:
    """Updates chunks of one format. One thread at a time; torch's threads as the calling thread has them set."""

    kernel: Kernel  # the one that runs

    def __init__(
        self,
        settings: AdamSettings,
        *,
        grad_dtype: torch.dtype,
        param_dtype: torch.dtype | None,
        state_precision: StatePrecision,
        kernel: Kernel | None = None,
        cache_dir: Path | None = None,
        device: torch.device | str = "cpu",
        announce: Callable[[str], None] | None = None,
    ) -> None:
        """Make or load the kernel: 6 ms from the cache, 10 to 20 s where it must be compiled.

        `param_dtype`: None in fp32 training, where the master is the param. `kernel`: the one a job began with; None
        takes the compiled one, and where it cannot be had the fused one, with the reason logged and announced.
        `cache_dir`: where compiled kernels are kept, closed to other users; None keeps none. `announce` is handed a
        line for people before anything takes that long.

        Raises:
            KernelUnavailable: `kernel` is COMPILED and cannot be had.
            OSError: the disk is full. With the other kernel the job would never have this one's bits, nor its speed.
        """
        if state_precision is not StatePrecision.FP32 and param_dtype is not torch.bfloat16:
            raise ValueError(f"{state_precision} states need a model in bf16, not {param_dtype}")
        self.settings = settings
        self.format = Format(grad=grad_dtype, param=param_dtype, states=state_precision, decoupled=settings.decoupled)
        self.device = torch.device(device)
        self._names = _names(self.format)
        self.kernel = kernel or Kernel.COMPILED
        if self.kernel is Kernel.COMPILED:
            try:
                self._run = self._compiled(cache_dir, announce)
            except KernelUnavailable as error:
                if kernel is not None:
                    raise
                reason = f"Updates run through torch's fused kernel, which is slower: {error}"
                _logger.warning("%s", reason)
                if announce is not None:
                    announce(reason)
                self.kernel = Kernel.FUSED
        if self.kernel is Kernel.FUSED:
            self._fused = FusedUpdate(settings, self.format)

    def update(
        self,
        states: ChunkStates,
        *,
        learning_rate: float,
        step: int,
        grad_scale: float,
        decay_numel: int,
        seed: int = 0,
        position: int = 0,
    ) -> None:
        """Update a chunk in place. `step` counts from 1; the gradient, which stays, counts times `grad_scale`.

        The first `decay_numel` elements have weight decay. `seed` and `position`, the chunk's first element's place in
        the model, draw the random rounding of bf16 states; there the position must be even, and unique in the model.

        Raises:
            WrongStates: the tensors are not of the format; nothing was updated.
        """
        tensors = self._checked(states)
        numel = tensors[0].numel()
        if not 0 <= decay_numel <= numel:
            raise ValueError(f"decay_numel is {decay_numel} in a chunk of {numel} elements")
        if self.kernel is Kernel.FUSED:
            self._fused.update(
                tensors,
                learning_rate=learning_rate,
                step=step,
                grad_scale=grad_scale,
                decay_numel=decay_numel,
                seed=seed,
                position=position,
            )
            return
        if position % 2 and self.format.in_pairs:
            raise ValueError(f"a chunk's position must be even, not {position}: elements are rounded in pairs")
        scalars = self._scalars(learning_rate, step, grad_scale)
        for part in self._ranges(numel, decay_numel, position):
            for scalar, decay in ((Scalar.DECAY, part.decay), (Scalar.ODD_DECAY, part.odd_decay)):
                scalars[scalar] = 1 - learning_rate * decay if self.settings.decoupled else decay
            constants = [scalars_of(scalars)]
            if self.format.num_integers:
                constants.append(_integers(seed, step, position + part.start))
            if self.device.type != "cpu":
                # From pinned memory, which is kept until it has been copied: nobody waits for the device.
                constants = [each.pin_memory().to(self.device, non_blocking=True) for each in constants]
            self._update_range(tensors, part, constants)

    def _update_range(self, tensors: list[torch.Tensor], part: _Range, constants: list[torch.Tensor]) -> None:
        views = [tensor[part.start : part.stop] for tensor in tensors]
        if part.stop - part.start >= _SCRATCH_NUMEL:
            self._run(*self._as_arguments(views), *constants)
            return
        scratch = [torch.zeros(_SCRATCH_NUMEL, dtype=view.dtype, device=view.device) for view in views]
        for padded, view in zip(scratch, views, strict=True):
            padded[: view.numel()] = view
        self._run(*self._as_arguments(scratch), *constants)
        for padded, view in zip(scratch[1:], views[1:], strict=True):  # the gradient stays
            view.copy_(padded[: view.numel()])

    def _as_arguments(self, views: list[torch.Tensor]) -> list[torch.Tensor]:
        return pair_words(views) if self.format.in_pairs else views

    def _ranges(self, numel: int, decay_numel: int, position: int) -> Iterator[_Range]:
        """Ranges of one decay and one key, in order. A pair across the end of the decay is a range by itself."""
        decay = self.settings.weight_decay
        if decay_numel % 2 == 0 or not self.format.in_pairs:
            yield from self._cut(0, decay_numel, decay, position)
            yield from self._cut(decay_numel, numel, 0.0, position)
            return
        yield from self._cut(0, decay_numel - 1, decay, position)
        yield _Range(decay_numel - 1, min(decay_numel + 1, numel), decay, 0.0)
        yield from self._cut(decay_numel + 1, numel, 0.0, position)

    def _cut(self, start: int, stop: int, decay: float, position: int) -> Iterator[_Range]:
        while start < stop:
            key_stop = start + NUMEL_PER_KEY - (position + start) % NUMEL_PER_KEY
            part_stop = min(stop, key_stop)
            if part_stop - start > _SCRATCH_NUMEL:
                part_stop -= part_stop % 2
            yield _Range(start, part_stop, decay, decay)
            start = part_stop

    def _scalars(self, learning_rate: float, step: int, grad_scale: float) -> dict[Scalar, float]:
        settings = self.settings
        return {
            Scalar.GRAD_SCALE: grad_scale,
            Scalar.ONE_MINUS_BETA1: 1 - settings.beta1,
            Scalar.BETA2: settings.beta2,
            Scalar.ONE_MINUS_BETA2: 1 - settings.beta2,
            Scalar.ROOT_OF_CORRECTION2: math.sqrt(1 - settings.beta2**step),
            Scalar.EPSILON: settings.epsilon,
            Scalar.STEP_SIZE: learning_rate / (1 - settings.beta1**step),
        }

    def _compiled(self, cache_dir: Path | None, announce: Callable[[str], None] | None) -> Callable[..., None]:
        if self.device.type == "cpu":
            return load_kernel(self.format, cache_dir, announce)
        # Imported here: it imports the compiler, which a process without a GPU never needs.
        from windlass.engine.optimizer.device_kernel import compile_here

        if announce is not None:
            announce(f"Compiling the update kernel for {self.device}: 10 to 20 s, less where it has been done before")
        return compile_here(self.format, self.device, cache_dir)

    def _checked(self, states: ChunkStates) -> list[torch.Tensor]:
        """The tensors that the kernel takes, in its order. It would write through anything."""
        given = {field.name for field in fields(states) if getattr(states, field.name) is not None}
        if given != set(self._names):
            raise WrongStates(
                f"{self.format.states} states are {', '.join(self._names)}; given: {', '.join(sorted(given))}"
            )
        tensors = [getattr(states, name) for name in self._names]
        numel = tensors[0].numel()
        for name, tensor, dtype in zip(self._names, tensors, self.format.operand_dtypes(), strict=True):
            if (
                tensor.dtype is not dtype
                or tensor.shape != (numel,)
                or not tensor.is_contiguous()
                or tensor.device.type != self.device.type
                or tensor.data_ptr() % _ALIGNMENT_NBYTES
            ):
                raise WrongStates(
                    f"{name} must be a flat {dtype} tensor of {numel} elements on {self.device.type}, beginning at a "
                    f"multiple of {_ALIGNMENT_NBYTES} bytes; it is {tensor.dtype}, {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()}, on {tensor.device}, at {tensor.data_ptr() % _ALIGNMENT_NBYTES} bytes past one"
                )
        return tensors


def _names(kernel: Format) -> tuple[str, ...]:
    """Fields of `ChunkStates` in the order in which formulas take them."""
    match kernel.states:
        case StatePrecision.FP32:
            return ("grad", "master", "exp_avg", "exp_avg_sq", *(() if kernel.param is None else ("param",)))
        case StatePrecision.SPLIT:
            return ("grad", "param", "residual", "exp_avg", "exp_avg_sq")
        case StatePrecision.BF16:
            return ("grad", "param", "exp_avg", "exp_avg_sq")


def _integers(seed: int, step: int, position: int) -> torch.Tensor:
    """The keys, and half the position within what they serve; int32, wrapped around as hashing does."""
    word = position % NUMEL_PER_KEY // 2
    wrapped = word - (1 << 32) if word >= 1 << 31 else word
    return torch.tensor([*rounding_keys(seed, step, position), wrapped], dtype=torch.int32)
