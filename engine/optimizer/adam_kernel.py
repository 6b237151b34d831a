"""AdamW and Adam on a chunk, in place and in one pass over memory, on states of any precision.

Two kernels do the same work. COMPILED computes the formulas (`adam_formulas`): C++ on a CPU (`kernel_cache`), on a GPU
the formulas themselves, compiled (`device_kernel`). It runs at memory bandwidth and does not hold the GIL. FUSED is
PyTorch's own fused kernel, slice by slice, for machines without a C++ compiler. Their results differ in the last bit,
so a job keeps the kernel that it began with.

Measured on two cores, 32 Mi elements in an arena, gradients in bf16:

- COMPILED transfers 1.1 to 1.3 times the bytes per second of memcpy on fp32 states.
- It transfers 1.2 to 1.5 times as many on split states, and 1.0 to 1.5 times as many on bf16 states.
- A pass that only adds is 4 percent faster on fp32 states.
- FUSED on one core takes 1.3 times as long on fp32 states, 5 times on split ones, 10 times on bf16 ones.
- On 14 cores beside an H100, 128 Mi elements and fp32 states: COMPILED 4.2 G params/s, FUSED 2.0, and in a job, where
  other threads of the process need the GIL, 0.8.
- The times on two cores need a C library that keeps freed memory between slices; more threads help FUSED little.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from windlass.engine.optimizer.adam_formulas import AdamSettings, Format, Scalar, pair_words, scalars_of
from windlass.engine.optimizer.fused_adam import FusedUpdate
from windlass.engine.optimizer.kernel_cache import KernelUnavailable, load_kernel
from windlass.engine.optimizer.stochastic_rounding import NUMEL_PER_KEY, rounding_keys
from windlass.storage.ids import Kernel, StateKind, StatePrecision

__all__ = ["AdamSettings", "ChunkStates", "Kernel", "KernelUnavailable", "OptimizerKernel", "WrongStates"]

_logger = logging.getLogger(__name__)

# Elements of a scratch tensor for shorter ranges and odd ends: a GPU's compiled kernel needs at least two words.
_SCRATCH_NUMEL = 4
_ALIGNMENT_NBYTES = 8  # each tensor of a chunk begins at a multiple of this


@dataclass(slots=True, kw_only=True)
class ChunkStates:
    """Views of one chunk's states: contiguous, of equal length, each beginning at a multiple of 8 bytes.

    fp32 states: master, and param if the model computes in 16 bits. Split states: param and residual. bf16 states: only
    param.
    """

    grad: torch.Tensor  # bf16, fp16 or fp32
    exp_avg: torch.Tensor  # fp32; bf16 with bf16 states
    exp_avg_sq: torch.Tensor  # as exp_avg; with split states its signs mark ties, see `split_master`
    param: torch.Tensor | None = None  # bf16 or fp16
    master: torch.Tensor | None = None  # fp32
    residual: torch.Tensor | None = None  # int16

    @classmethod
    def of(cls, grad: torch.Tensor, states: Mapping[StateKind, torch.Tensor]) -> "ChunkStates":
        """Returns a chunk's gradient and states, by kind."""
        return cls(grad=grad, **{str(kind): state for kind, state in states.items()})


class WrongStates(ValueError):
    """The tensors of a chunk do not have the kernel's format."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The elements of a chunk that one call updates. `start` is even if elements form pairs."""

    start: int
    stop: int
    decay: float  # weight decay of the even elements, or of all
    odd_decay: float  # weight decay of the odd elements


class OptimizerKernel:
    """Updates chunks of one format, with the calling thread's number of torch threads. It is not thread-safe."""

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
        """Loads or compiles the kernel: a second for a compilation on a CPU.

        Args:
            settings: the constants of Adam.
            grad_dtype: the dtype of gradients.
            param_dtype: the dtype of params; None in fp32 training, where the master is the param.
            state_precision: the format of the states.
            kernel: the kernel that a job began with. None: the compiled one, or the fused one if compilation fails;
                then the reason is logged and announced.
            cache_dir: the directory of compiled kernels, closed to other users; None: kernels are not kept.
            device: the device of the chunks.
            announce: is called with a line for the user before a long compilation.

        Raises:
            KernelUnavailable: `kernel` is COMPILED and is not available.
            OSError: the disk is full. There is no fallback then, because the job would keep the slower kernel.
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
        """Updates a chunk in place. The gradient is not changed.

        Args:
            states: the chunk's tensors.
            learning_rate: the rate of this step.
            step: the step, counted from 1.
            grad_scale: factor of the gradient.
            decay_numel: the number of first elements that have weight decay.
            seed: for the random rounding of bf16 states.
            position: the index in the model of the chunk's first element, for the random rounding. It must be even if
                elements form pairs, and unique in the model.

        Raises:
            WrongStates: the tensors do not have the format; nothing was updated.
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
                # From pinned memory, so that the host does not wait; PyTorch keeps it until the copy is over.
                constants = [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in constants]
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
        for padded, view in zip(scratch[1:], views[1:], strict=True):  # without the gradient, which does not change
            view.copy_(padded[: view.numel()])

    def _as_arguments(self, views: list[torch.Tensor]) -> list[torch.Tensor]:
        return pair_words(views) if self.format.in_pairs else views

    def _ranges(self, numel: int, decay_numel: int, position: int) -> Iterator[_Range]:
        """Yields ranges of one decay and one rounding key, in order. A pair across the end of decay is a range."""
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
        # Imported here, because it imports the compiler, which a process without a GPU never needs.
        from windlass.engine.optimizer.device_kernel import compile_here

        if announce is not None:
            announce(f"Compiling the update kernel for {self.device}: 10 to 20 s, less if the compiler has cached it")
        return compile_here(self.format, self.device, cache_dir)

    def _checked(self, states: ChunkStates) -> list[torch.Tensor]:
        """Checks the tensors and returns them in the kernel's order. The kernel itself checks nothing."""
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
    """Returns the fields of `ChunkStates` in the order of the formulas' arguments."""
    match kernel.states:
        case StatePrecision.FP32:
            return ("grad", "master", "exp_avg", "exp_avg_sq", *(() if kernel.param is None else ("param",)))
        case StatePrecision.SPLIT:
            return ("grad", "param", "residual", "exp_avg", "exp_avg_sq")
        case StatePrecision.BF16:
            return ("grad", "param", "exp_avg", "exp_avg_sq")


def _integers(seed: int, step: int, position: int) -> torch.Tensor:
    """Returns the rounding keys, and half the position within a key's range, as int32 with wrap-around."""
    word = position % NUMEL_PER_KEY // 2
    wrapped = word - (1 << 32) if word >= 1 << 31 else word
    return torch.tensor([*rounding_keys(seed, step, position), wrapped], dtype=torch.int32)
