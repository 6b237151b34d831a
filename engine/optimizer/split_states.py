"""Stores the fp32 master as two parts: the bf16 param, rounded to nearest even, and a 16-bit residual, the low half.

The master's upper half follows from the param: rounding added one to it if the residual is above the middle. For a
residual in the middle (0x8000) rounding goes to the even neighbour, up or down. The sign of exp_avg_sq stores the
direction, because a mean of squares is never negative. So joining restores the master bit for bit; NaN stays NaN.
"""

import torch

_TIE = 0x8000
_LOW_HALF = 0xFFFF
_SIGN = -(1 << 31)
_NAN = 0x7FC00000


def split_master(master: torch.Tensor, exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits an fp32 master into param (bf16), residual (int16) and exp_avg_sq, negative where a tie rounded down."""
    bits = master.view(torch.int32)
    param = (rounded_bits(master) >> 16).to(torch.int16).view(torch.bfloat16)
    return param, bits.to(torch.int16), marked_ties(bits, exp_avg_sq)


def join_master(param: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 master from the parts that `split_master` made."""
    param_bits = param.view(torch.int16).to(torch.int32) << 16
    return joined(param_bits, residual.to(torch.int32), exp_avg_sq)


def plain_exp_avg_sq(exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """Returns exp_avg_sq without the mark, for training and for exports."""
    return exp_avg_sq.abs()


def rounded_bits(master: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 to nearest even as bf16, in the high half of int32. The low half is meaningless.

    PyTorch's cast is not used, because on some processors its instruction flushes denormal numbers to zero.
    """
    bits = master.view(torch.int32)
    return torch.where(master == master, bits + (0x7FFF + ((bits >> 16) & 1)), _NAN)


def joined(param_bits: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 master from int32 operands: the param in the high half, the residual with its sign extended."""
    rounded_down = (exp_avg_sq.view(torch.int32) >> 31) & 0x10000
    return (param_bits + residual + rounded_down).view(torch.float32)


def marked_ties(bits: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """Returns exp_avg_sq with its sign set where the master of these bits is a tie whose upper half is even."""
    is_rounded_down = (bits & (0x10000 | _LOW_HALF)) == _TIE
    marks = is_rounded_down.to(torch.int32) << 31
    return ((exp_avg_sq.view(torch.int32) & ~_SIGN) | marks).view(torch.float32)
