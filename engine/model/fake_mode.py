"""Fake tensors, which have shapes but no contents, for running a model's operators without computing."""

from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_tensors() -> FakeTensorMode:
    """Returns a mode in which operators return tensors without contents. Their inputs may be real tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _grouped_mm(
    fake: FakeTensorMode,
    _: Any,
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Returns the output shape of experts' matrix products. PyTorch's own shape function accepts only bf16."""
    with fake:
        return _create_grouped_mm_output_tensor(left, right, offsets, out_dtype)  # type: ignore[no-untyped-call]


# Some versions of PyTorch lack these functions. Then models with experts can be planned only in bf16.
with suppress(ImportError, AttributeError):
    from torch._meta_registrations import _create_grouped_mm_output_tensor
    from torch._subclasses.fake_impls import register_op_impl

    register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_mm)
