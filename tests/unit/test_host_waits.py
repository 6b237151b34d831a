"""`no_host_waits` finds each kind of operator for which the host waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.host_waits import GPU, HostWaitError, host_wait_of, no_host_waits

_WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "bool": lambda values: bool(values.sum()),
    "item": lambda values: values[0].item(),
    "nonzero": lambda values: values.nonzero(),
    "mask": lambda values: values[values > 0],
    "assigned mask": lambda values: values.__setitem__(values > 0, torch.empty(8, device=GPU)),
    "repeats": lambda values: values.repeat_interleave(values.long()),
    "unique": lambda values: values.unique(),
    "to host": lambda values: values.cpu(),
    "from host": lambda values: values.copy_(torch.ones(8)),
    "numbers": lambda values: torch.tensor(2.0, device=GPU),
}


@pytest.mark.parametrize("wait", _WAITS.values(), ids=_WAITS)
def test_an_operator_that_makes_the_host_wait_is_found(wait: Callable[[torch.Tensor], object]) -> None:
    values = torch.empty(8, device=GPU)
    with pytest.raises(HostWaitError), no_host_waits():
        wait(values)


def test_launches_and_the_largest_new_tensor_are_counted() -> None:
    values = torch.empty(8, device=GPU)
    with no_host_waits() as launches:
        values[:4].mul_(2.0)
        torch.full((3,), 2.0, device=GPU)
    assert launches.num_launches == 2
    assert launches.max_nbytes == 12


def found_on_the_cpu(work: Callable[[], object]) -> list[str]:
    """The operators of work on the CPU for which a GPU's host would wait."""
    found: list[str] = []

    class Finder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (name := host_wait_of(func, args, kwargs)) is not None:
                found.append(name)
            return func(*args, **(kwargs or {}))

    with Finder():
        work()
    return found


def test_masks_as_indices_are_found_on_a_cpu() -> None:
    values, mask = torch.arange(8.0), torch.arange(8) > 3
    assert found_on_the_cpu(lambda: values[mask]) == ["aten.index"]
    assert found_on_the_cpu(lambda: values.__setitem__(mask, torch.ones(4))) == ["aten.index_put_"]
    assert found_on_the_cpu(lambda: values.repeat_interleave(torch.tensor(2))) == ["aten.repeat_interleave"]


def test_indices_without_values_on_the_host_are_not_found_on_a_cpu() -> None:
    values, mask = torch.arange(8.0), torch.arange(8) > 3
    assert found_on_the_cpu(lambda: values[torch.tensor([1, 2])]) == []
    assert found_on_the_cpu(lambda: values.__setitem__(mask, 0.0)) == []  # a GPU fills it in
    repeats = torch.full((8,), 2)
    assert found_on_the_cpu(lambda: values.repeat_interleave(repeats, output_size=16)) == []
