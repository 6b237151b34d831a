"""Adam and AdamW on one chunk in plain PyTorch, written to be compiled into one pass over memory.

If states have 16 bits, two neighbouring elements form one word, because the compiler has no vector code for int16.
The shifts for split masters and random rounding also cost less in words than conversions between formats. A pair of
bf16 or fp16 numbers is an int32 word, a pair of fp32 numbers an int64 word. The even element is the low half.

Source: Kingma and Ba, Adam, algorithm 1; Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
The order of operations is that of torch.optim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch

from windlass.engine.optimizer.split_states import joined, marked_ties, plain_exp_avg_sq, rounded_bits
from windlass.engine.optimizer.stochastic_rounding import (
    NUM_KEYS,
    plain_nan,
    random_words,
    rounded_pairs,
    shifted_right,
)
from windlass.storage.ids import StatePrecision

_HIGH_HALF = -0x10000
_LOW_HALF = 0xFFFF
_LOW_WORD = 0xFFFFFFFF
_WORD_OF = {
    torch.bfloat16: torch.int32,
    torch.float16: torch.int32,
    torch.int16: torch.int32,
    torch.float32: torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """The settings of Adam that are constant during a job."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    decoupled: bool  # AdamW; else Adam, whose decay is part of the gradient


class Scalar(IntEnum):
    """Indices into the fp32 vector of values that are the same for all elements of a call."""

    GRAD_SCALE = 0
    DECAY = 1  # AdamW: factor of the weight; Adam: share of the weight that is added to the gradient
    ODD_DECAY = 2  # the same for the odd element of each pair, if elements form pairs
    ONE_MINUS_BETA1 = 3
    BETA2 = 4
    ONE_MINUS_BETA2 = 5
    ROOT_OF_CORRECTION2 = 6
    EPSILON = 7
    STEP_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The properties for which a kernel is compiled. All other values are arguments of each call."""

    grad: torch.dtype
    param: torch.dtype | None  # None: the master is the param
    states: StatePrecision
    decoupled: bool  # AdamW; else Adam, with the decay in the gradient

    @property
    def in_pairs(self) -> bool:
        """True if two elements form a word."""
        return self.states is not StatePrecision.FP32

    def operand_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes of a chunk's tensors, in the order of the formula's arguments."""
        match self.states:
            case StatePrecision.FP32:
                param = [] if self.param is None else [self.param]
                return [self.grad, torch.float32, torch.float32, torch.float32, *param]
            case StatePrecision.SPLIT:
                return [self.grad, torch.bfloat16, torch.int16, torch.float32, torch.float32]
            case StatePrecision.BF16:
                return [self.grad, torch.bfloat16, torch.bfloat16, torch.bfloat16]

    def argument_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes of the formula's arguments: words of two elements if elements form pairs."""
        return [_WORD_OF[dtype] if self.in_pairs else dtype for dtype in self.operand_dtypes()]

    @property
    def num_integers(self) -> int:
        """The number of int32 arguments of each call: the rounding's keys, and half the first element's position."""
        return NUM_KEYS + 1 if self.states is StatePrecision.BF16 else 0


def formula(kernel: Format) -> Callable[..., None]:
    """Returns the in-place update of a range: f(*tensors, scalars), for bf16 states f(*tensors, scalars, integers)."""
    match kernel.states:
        case StatePrecision.FP32:
            return partial(_update_fp32, kernel)
        case StatePrecision.SPLIT:
            return partial(_update_split, kernel)
        case StatePrecision.BF16:
            return partial(_update_bf16, kernel)


def _update_fp32(
    kernel: Format,
    grad: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *rest: torch.Tensor,
) -> None:
    *param, scalars = rest
    states = _stepped(kernel, scalars, Scalar.DECAY, grad.to(torch.float32), master, exp_avg, exp_avg_sq)
    for target, value in zip((master, exp_avg, exp_avg_sq), states, strict=True):
        target.copy_(value)
    for target in param:
        target.copy_(states[0])


def _update_split(
    kernel: Format,
    grad: torch.Tensor,
    param: torch.Tensor,
    residual: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    grads, averages, squares = _pair(grad, kernel.grad), _fp32_pair(exp_avg), _fp32_pair(exp_avg_sq)
    params = (param << 16, param & _HIGH_HALF)
    residuals = ((residual << 16) >> 16, residual >> 16)
    results = []
    for i, decay in enumerate((Scalar.DECAY, Scalar.ODD_DECAY)):
        master = joined(params[i], residuals[i], squares[i])
        square = plain_exp_avg_sq(squares[i])
        results.append(_stepped(kernel, scalars, decay, grads[i], master, averages[i], square))
    bits = [result[0].view(torch.int32) for result in results]
    rounded = [rounded_bits(result[0]) for result in results]
    marked = [marked_ties(bits[i], results[i][2]) for i in (0, 1)]
    param.copy_(shifted_right(rounded[0], 16) | (rounded[1] & _HIGH_HALF))
    residual.copy_((bits[0] & _LOW_HALF) | (bits[1] << 16))
    exp_avg.copy_(_fp32_word(results[0][1], results[1][1]))
    exp_avg_sq.copy_(_fp32_word(marked[0], marked[1]))


def _update_bf16(
    kernel: Format,
    grad: torch.Tensor,
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: torch.Tensor,
    integers: torch.Tensor,
) -> None:
    words = torch.arange(param.shape[0], dtype=torch.int32, device=param.device) + integers[NUM_KEYS]
    grads = _pair(grad, kernel.grad)
    if kernel.grad is not torch.bfloat16:  # a bf16 NaN already has an empty low half
        grads = (plain_nan(grads[0]), plain_nan(grads[1]))
    targets = (param, exp_avg, exp_avg_sq)
    pairs = [_pair(state, torch.bfloat16) for state in targets]
    even, odd = (
        _stepped(kernel, scalars, decay, grads[i], *(pair[i] for pair in pairs))
        for i, decay in enumerate((Scalar.DECAY, Scalar.ODD_DECAY))
    )
    for target, low, high, random in zip(targets, even, odd, random_words(words, integers), strict=True):
        target.copy_(rounded_pairs(low, high, random))


def _stepped(
    kernel: Format,
    scalars: torch.Tensor,
    decay: Scalar,
    grad: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (master, exp_avg, exp_avg_sq) after one step, all fp32."""
    grad = grad * scalars[Scalar.GRAD_SCALE]
    if kernel.decoupled:
        master = master * scalars[decay]
    else:
        grad = grad + master * scalars[decay]
    exp_avg = exp_avg + (grad - exp_avg) * scalars[Scalar.ONE_MINUS_BETA1]
    exp_avg_sq = exp_avg_sq * scalars[Scalar.BETA2] + grad * grad * scalars[Scalar.ONE_MINUS_BETA2]
    denominator = exp_avg_sq.sqrt() / scalars[Scalar.ROOT_OF_CORRECTION2] + scalars[Scalar.EPSILON]
    return master - exp_avg * scalars[Scalar.STEP_SIZE] / denominator, exp_avg, exp_avg_sq


def _pair(words: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the even and the odd elements of words with pairs of `dtype`, as fp32."""
    if dtype is torch.float32:
        return _fp32_pair(words)
    if dtype is torch.bfloat16:
        return (words << 16).view(torch.float32), (words & _HIGH_HALF).view(torch.float32)
    return _fp16_to_fp32(words << 16), _fp16_to_fp32(words)


def _fp32_pair(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return words.to(torch.int32).view(torch.float32), (words >> 32).to(torch.int32).view(torch.float32)


def _fp32_word(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    low, high = (half.view(torch.int32).to(torch.int64) for half in (even, odd))
    return (high << 32) | (low & _LOW_WORD)


def _fp16_to_fp32(bits: torch.Tensor) -> torch.Tensor:
    """Converts the fp16 number in the high half of int32, exactly. Its exponent bias is 112 less than that of fp32."""
    magnitude = ((bits >> 3) & 0x0FFFE000).view(torch.float32) * 2.0**112
    # fp16 cannot hold 65536 and more, so such values are infinities and NaNs.
    special = (magnitude >= 65536.0).to(torch.int32) * 0x7F800000
    return (magnitude.view(torch.int32) | special | (bits & -(1 << 31))).view(torch.float32)


def scalars_of(values: dict[Scalar, float]) -> torch.Tensor:
    """Returns the fp32 vector of scalars for the formulas."""
    return torch.tensor([values[scalar] for scalar in Scalar], dtype=torch.float32)


def pair_words(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of tensors as words of two elements. Their numbers of elements must be even."""
    return [tensor.view(_WORD_OF[tensor.dtype]) for tensor in tensors]
