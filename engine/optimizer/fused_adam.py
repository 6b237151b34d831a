"""Updates chunks by PyTorch's fused Adam, slice by slice, so that each operation finds its data in the caches.

It serves machines without a C++ compiler. PyTorch does all arithmetic; states are converted to fp32 and back. On a GPU
slices are larger, because each costs a dozen launches, and no operator makes the host wait.
"""

from collections.abc import Iterator, Sequence

import torch

from windlass.engine.optimizer.adam_formulas import AdamSettings, Format
from windlass.engine.optimizer.scratch_sizes import DEVICE_SLICE_NUMEL
from windlass.engine.optimizer.split_states import join_master, plain_exp_avg_sq, split_master
from windlass.engine.optimizer.stochastic_rounding import NUMEL_PER_KEY, random_halves, rounded
from windlass.storage.ids import StatePrecision

# Elements of a slice: 1 MiB of fp32, so that five arrays fit the caches. It was the fastest of all measured sizes.
_SLICE_NUMEL = 2**18
_LOW_HALF = 0xFFFF
_TIE = 0x8000
_SIGN = -(1 << 31)
# Elements: a multiple of the length of PyTorch's SIMD vectors.
_VECTOR_NUMEL = 64


class FusedUpdate:
    """Updates chunks of one format, with the tensors of a compiled kernel."""

    def __init__(self, settings: AdamSettings, kernel: Format) -> None:
        self.settings = settings
        self.format = kernel
        self._fused = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_

    def update(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        learning_rate: float,
        step: int,
        grad_scale: float,
        decay_numel: int,
        seed: int,
        position: int,
    ) -> None:
        """Updates a chunk in place. `tensors` are in the order of the format's operands."""
        numel = tensors[0].numel()
        slice_numel = _SLICE_NUMEL if tensors[0].device.type == "cpu" else DEVICE_SLICE_NUMEL
        for start, stop, decay in ((0, decay_numel, self.settings.weight_decay), (decay_numel, numel, 0.0)):
            for first, last in _slices(start, stop, position, slice_numel):
                views = [tensor[first:last] for tensor in tensors]
                grad = views[0].to(torch.float32, copy=True).mul_(grad_scale)
                match self.format.states:
                    case StatePrecision.FP32:
                        self._update_fp32(views, grad, learning_rate, step, decay)
                    case StatePrecision.SPLIT:
                        self._update_split(views, grad, learning_rate, step, decay)
                    case StatePrecision.BF16:
                        random = random_halves(position + first, last - first, seed, step, grad.device)
                        self._update_bf16(views, grad, learning_rate, step, decay, random)

    def _update_fp32(
        self, views: Sequence[torch.Tensor], grad: torch.Tensor, learning_rate: float, step: int, decay: float
    ) -> None:
        _, master, exp_avg, exp_avg_sq, *param = views
        self._step(grad, (master, exp_avg, exp_avg_sq), learning_rate, step, decay)
        for target in param:
            target.copy_(master)

    def _update_split(
        self, views: Sequence[torch.Tensor], grad: torch.Tensor, learning_rate: float, step: int, decay: float
    ) -> None:
        _, param, residual, exp_avg, exp_avg_sq = views
        master = join_master(param, residual, exp_avg_sq)
        exp_avg_sq.copy_(plain_exp_avg_sq(exp_avg_sq))
        self._step(grad, (master, exp_avg, exp_avg_sq), learning_rate, step, decay)
        write_split(master, param, residual, exp_avg_sq)

    def _update_bf16(
        self,
        views: Sequence[torch.Tensor],
        grad: torch.Tensor,
        learning_rate: float,
        step: int,
        decay: float,
        random: Sequence[torch.Tensor],
    ) -> None:
        states = [view.to(torch.float32) for view in views[1:]]
        self._step(grad, states, learning_rate, step, decay)
        for target, value, halves in zip(views[1:], states, random, strict=True):
            write_rounded(value, target, halves)

    def _step(
        self, grad: torch.Tensor, states: Sequence[torch.Tensor], learning_rate: float, step: int, decay: float
    ) -> None:
        """Updates fp32 states (master, exp_avg, exp_avg_sq) in place by one step."""
        whole = grad.numel() - grad.numel() % _VECTOR_NUMEL
        self._step_vectors(grad[:whole], [state[:whole] for state in states], learning_rate, step, decay)
        if whole == grad.numel():
            return
        # The last elements are padded to a vector, because PyTorch's code for partial vectors rounds differently. Else
        # results would depend on the chunk's length.
        missing = (0, _VECTOR_NUMEL - grad.numel() % _VECTOR_NUMEL)
        padded = [torch.nn.functional.pad(state[whole:], missing) for state in states]
        self._step_vectors(torch.nn.functional.pad(grad[whole:], missing), padded, learning_rate, step, decay)
        for state, values in zip(states, padded, strict=True):
            state[whole:] = values[: grad.numel() - whole]

    def _step_vectors(
        self, grad: torch.Tensor, states: Sequence[torch.Tensor], learning_rate: float, step: int, decay: float
    ) -> None:
        master, exp_avg, exp_avg_sq = states
        self._fused(
            [master],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.full((), float(step), device=grad.device)],  # not `tensor`, which makes the host wait for a GPU
            lr=learning_rate,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            weight_decay=decay,
            eps=self.settings.epsilon,
            amsgrad=False,
            maximize=False,
        )


def write_split(master: torch.Tensor, param: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Writes the parts of a master by `split_master` to the other three tensors. The master does not change."""
    if _may_hold_nan(master):
        for target, value in zip((param, residual, exp_avg_sq), split_master(master, exp_avg_sq), strict=True):
            target.copy_(value)
        return
    bits, squares = master.view(torch.int32), exp_avg_sq.view(torch.int32)
    residual.copy_(bits)
    # Ties became 0, and only 0 - 1 is negative.
    ties = bits.bitwise_and(0x10000 | _LOW_HALF).bitwise_xor_(_TIE).sub_(1).bitwise_and_(_SIGN)
    squares.bitwise_and_(~_SIGN).bitwise_or_(ties)
    words = torch.bitwise_right_shift(bits, 16, out=ties)
    param.view(torch.int16).copy_(words.bitwise_and_(1).add_(0x7FFF).add_(bits).bitwise_right_shift_(16))


def write_rounded(values: torch.Tensor, target: torch.Tensor, random: torch.Tensor) -> None:
    """Rounds fp32 values like `rounded` and writes them to a bf16 target."""
    if _may_hold_nan(values):
        target.copy_(rounded(values, random))
        return
    words = random.to(torch.int32).bitwise_and_(_LOW_HALF).add_(values.view(torch.int32))
    target.view(torch.int16).copy_(words.bitwise_right_shift_(16))


def _may_hold_nan(values: torch.Tensor) -> bool:
    """Checks by the sum whether values may hold NaN, because NaN makes the sum NaN; on a GPU they always may.

    The check saves time: comparison and selection by element, which only NaN needs, take ten times as long on a CPU. On
    a GPU the host would have to wait for the sum.
    """
    return values.device.type != "cpu" or bool(values.sum().isnan())


def _slices(start: int, stop: int, position: int, slice_numel: int) -> Iterator[tuple[int, int]]:
    """Yields slices of a range. Each slice is within one key of the random rounding."""
    while start < stop:
        numel_of_key = NUMEL_PER_KEY - (position + start) % NUMEL_PER_KEY
        last = min(start + min(slice_numel, numel_of_key), stop)
        yield start, last
        start = last
