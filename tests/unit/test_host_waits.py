"""`no_host_waits` finds each kind of operator for which the host waits."""

from collections.abc import Callable

import pytest
import torch

from tests.support.host_waits import GPU, HostWaitError, no_host_waits

_WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "bool": lambda values: bool(values.sum()),
    "item": lambda values: values[0].item(),
    "nonzero": lambda values: values.nonzero(),
    "mask": lambda values: values[values > 0],
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
