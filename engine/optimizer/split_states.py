"""The fp32 master kept as the bf16 param, which is it rounded to nearest even, and a 16-bit residual: its low half.

The upper half follows from the param: rounding added one to it where the residual is above the middle. In the middle
itself (0x8000) rounding goes to the even neighbour, up or down; one bit says which: the sign of exp_avg_sq, which as a
mean of squares has no use for it. So nothing is lost: joined is what was split, bit for bit; NaN stays NaN.
"""

import torch

_TIE = 0x8000
_LOW_HALF = 0xFFFF
_SIGN = -(1 << 31)
_NAN = 0x7FC00000


def split_master(master: torch.Tensor, exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(param bf16, residual int16, exp_avg_sq with its sign set where a tie was rounded down) of fp32 tensors."""
    bits = master.view(torch.int32)
    param = (rounded_bits(master) >> 16).to(torch.int16).view(torch.bfloat16)
    return param, bits.to(torch.int16), marked_ties(bits, exp_avg_sq)


def join_master(param: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """The fp32 master of what `split_master` made."""
    param_bits = param.view(torch.int16).to(torch.int32) << 16
    return joined(param_bits, residual.to(torch.int32), exp_avg_sq)


def plain_exp_avg_sq(exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """exp_avg_sq without the mark: what training reads, and what an export writes."""
    return exp_avg_sq.abs()


def rounded_bits(master: torch.Tensor) -> torch.Tensor:
    """int32 whose high half is the fp32 number rounded to nearest even, as bf16; the low half is to be dropped.

    Not torch's cast: some processors' instruction for that takes denormal numbers for zeros.
    """
    bits = master.view(torch.int32)
    return torch.where(master == master, bits + (0x7FFF + ((bits >> 16) & 1)), _NAN)


def joined(param_bits: torch.Tensor, residual: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """The fp32 master; int32 operands: the param in the high half, the residual with its sign extended."""
    rounded_down = (exp_avg_sq.view(torch.int32) >> 31) & 0x10000
    return (param_bits + residual + rounded_down).view(torch.float32)


def marked_ties(bits: torch.Tensor, exp_avg_sq: torch.Tensor) -> torch.Tensor:
    """exp_avg_sq, not negative, with its sign set where the master of these bits is a tie whose upper half is even."""
    is_rounded_down = (bits & (0x10000 | _LOW_HALF)) == _TIE
    marks = is_rounded_down.to(torch.int32) << 31
    return ((exp_avg_sq.view(torch.int32) & ~_SIGN) | marks).view(torch.float32)
