"""The torch dtypes of a job's number formats."""

import torch

from windlass.storage.ids import Formats, Precision, StateKind

TORCH_DTYPE = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.FP32: torch.float32}


def state_dtype(formats: Formats, kind: StateKind) -> torch.dtype:
    """Returns the dtype of one kind of state."""
    if kind is StateKind.PARAM:
        return TORCH_DTYPE[formats.precision]
    if kind is StateKind.RESIDUAL:
        return torch.int16
    return torch.float32 if formats.itemsizes[kind] == 4 else torch.bfloat16
