"""Tensors of shapes alone, for going through a model's operators without computing."""

from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_tensors() -> FakeTensorMode:
    """A mode in which operators make tensors that have no contents; what is given may have some."""
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
    """The products of experts: torch computes them in every precision, but tells their shapes in bf16 alone."""
    with fake:
        return _create_grouped_mm_output_tensor(left, right, offsets, out_dtype)  # type: ignore[no-untyped-call]


# Not every version of torch has them; without, such models have no plan but in bf16.
with suppress(ImportError, AttributeError):
    from torch._meta_registrations import _create_grouped_mm_output_tensor
    from torch._subclasses.fake_impls import register_op_impl

    register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_mm)
