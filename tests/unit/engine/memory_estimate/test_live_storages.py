"""The tracker counts exactly the storages that are alive."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from windlass.engine.memory_estimate.live_storages import LiveStorageTracker

CPU = torch.device("cpu")
KIB = 256  # elements of fp32


def test_storages_count_once_while_they_are_referenced() -> None:
    living = LiveStorageTracker(CPU)
    given = torch.ones(KIB)
    with living:
        assert living.begin() == 0
        first = given + 1
        view = first.view(16, 16)[2:].t()
        given.mul_(2)
        second = torch.cat([given, first])
        assert living.nbytes == 3 * 1024
        del first
        assert living.nbytes == 3 * 1024  # the view holds it
        del view
        assert living.nbytes == 2 * 1024
    del second  # also while the mode is off
    assert (living.nbytes, living.peak_nbytes) == (0, 3 * 1024)


def test_a_peak_counts_from_its_beginning() -> None:
    living = LiveStorageTracker(CPU)
    with living:
        large = torch.zeros(4 * KIB)
        del large
        kept = torch.zeros(KIB)
        assert living.begin() == 1024
        small = kept + 1
        del small
    assert living.peak_nbytes == 2 * 1024


def test_fake_tensors_count_as_real_ones_would() -> None:
    living = LiveStorageTracker(CPU)
    with FakeTensorMode(), living:
        here = torch.empty(KIB, dtype=torch.bfloat16)
        elsewhere = torch.empty(KIB, device="meta")
        assert living.nbytes == here.nbytes == 512
    del here, elsewhere
    assert living.nbytes == 0


class Twice(torch.autograd.Function):
    """Adds gradients in Python code, which torch does not do in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 1 + grad * 1


@pytest.mark.parametrize(("function", "num_at_once"), [(lambda x: x * 2 + x * 3, 2), (Twice.apply, 3)])
def test_the_engine_adds_gradients_up_in_place(function: Any, num_at_once: int) -> None:
    x = torch.ones(KIB, requires_grad=True)
    output, grad = function(x), torch.ones(KIB)
    living = LiveStorageTracker(CPU)
    with living:
        (found,) = torch.autograd.grad(output, x, grad)
    assert (living.nbytes, living.peak_nbytes) == (found.nbytes, num_at_once * 1024)


def test_a_cpu_copies_operands_of_another_type() -> None:
    half, full = torch.ones(KIB, dtype=torch.bfloat16), torch.ones(KIB)
    living = LiveStorageTracker(CPU)
    with living:
        living.begin()
        full.add_(half)
        assert living.peak_nbytes == 1024
        living.begin()
        full.copy_(half)
        full.add_(full)
    assert living.peak_nbytes == 0
