"""The squared norm equals that in fp64, and is finite exactly if the gradient is."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.host_waits import GPU, no_host_waits
from windlass.engine.optimizer import grad_norm
from windlass.engine.optimizer.grad_norm import NormInParts, portable_squared_norm, portable_squared_norms, squared_norm
from windlass.engine.optimizer.scratch_sizes import NORM_SCRATCH_NBYTES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 5, 1024, 5000, 2**19, 2**19 + 4097, 2**20 + 17]


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def without_waiting(grad: torch.Tensor) -> torch.Tensor:
    """`squared_norm` as a GPU computes it."""
    norm = NormInParts((0, grad.numel()), grad.dtype, grad.device, waits=False)
    norm.put(grad, 0)
    return norm.total()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_it_is_the_sum_of_squares(dtype: torch.dtype, numel: int) -> None:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    expected = grad.double().square().sum()
    torch.testing.assert_close(squared_norm(grad), expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 1023, 2**19 + 5, 2**20 + 2])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_squared_norm_with_one_element_not_finite_is_not_finite(dtype: torch.dtype, place: int, bad: float) -> None:
    grad = torch.full((2**20 + 3,), torch.finfo(dtype).max, dtype=dtype)
    expected = grad[0].double().square() * grad.numel()
    torch.testing.assert_close(squared_norm(grad), expected, rtol=5e-7, atol=0)
    grad[place] = bad
    assert not squared_norm(grad).isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", [(0, 1), (5, 5000), (5000, 5), (2**19 + 5, 17)])
def test_squared_norm_of_infinity_and_nan_is_nan(dtype: torch.dtype, places: tuple[int, int]) -> None:
    grad = torch.ones(2**19 + 4097, dtype=dtype)
    grad[places[0]] = -torch.inf
    assert squared_norm(grad).item() == torch.inf
    grad[places[1]] = torch.nan
    assert squared_norm(grad).isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squared_norm_with_any_number_of_threads_has_same_bits(dtype: torch.dtype) -> None:
    grad = torch.randn(2**21 + 4097, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for num_threads in (1, 2, 3, 8):
        torch.set_num_threads(num_threads)
        results.append(squared_norm(grad).item())
    assert len(set(results)) == 1


def test_rows_beside_one_that_overflows_fp32_still_count() -> None:
    grad = torch.ones(3 * 1024)
    grad[1500] = 3e19
    assert squared_norm(grad).item() == pytest.approx(9e38, rel=1e-6)
    grad[1500] = 1e10
    assert squared_norm(grad).item() == pytest.approx(1e20, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_norm_on_a_gpu_is_the_sum_of_squares(dtype: torch.dtype, numel: int) -> None:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    torch.testing.assert_close(without_waiting(grad), grad.double().square().sum(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_on_a_gpu_of_rows_that_overflow_fp32_is_exact(dtype: torch.dtype) -> None:
    grad = torch.randn(2**19 + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row in range(64):
        grad[row * 4096 + 7] = torch.finfo(dtype).max
    torch.testing.assert_close(without_waiting(grad), grad.double().square().sum(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("place", [0, 1023, 2**19 + 2])
@pytest.mark.parametrize(("bad", "expected"), [(-torch.inf, torch.inf), (torch.nan, torch.nan)])
def test_norm_on_a_gpu_with_one_element_not_finite_is_not_finite(place: int, bad: float, expected: float) -> None:
    grad = torch.ones(2**19 + 3, dtype=torch.bfloat16)
    grad[77] = torch.finfo(torch.bfloat16).max
    grad[place] = bad
    torch.testing.assert_close(without_waiting(grad), torch.tensor(expected).double(), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_on_a_gpu_makes_no_host_wait_and_no_copy_of_the_gradient(dtype: torch.dtype) -> None:
    grad = torch.empty(2**24 + 17, dtype=dtype, device=GPU)
    with no_host_waits() as launches:
        squared_norm(grad)
    assert launches.num_launches < 30
    assert launches.max_nbytes <= 2**20


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "bounds",
    [(0, 2**16, 2**17), (0, 7, 1000, 2**16 + 5, 2**17 + 900), (0, 2**17 - 1, 2**17), (0, 3000, 5000), (0, 0, 100, 500)],
)
def test_norm_in_parts_in_any_order_has_the_bits_of_the_whole(
    bounds: tuple[int, ...], dtype: torch.dtype, waits: bool
) -> None:
    grad = torch.randn(bounds[-1], generator=torch.Generator().manual_seed(0)).to(dtype)
    grad[bounds[1]] = 3e4
    norm = NormInParts(bounds, dtype, grad.device, waits=waits)
    for start, stop in [*reversed(list(itertools.pairwise(bounds))), bounds[:2]]:
        norm.put(grad[start:stop], start)
    assert norm.total().equal((squared_norm if waits else without_waiting)(grad))


def test_norm_in_parts_with_many_rows_that_overflow_is_that_of_the_whole() -> None:
    grad = torch.full((200 * 1024,), 1e19)
    norm = NormInParts((0, 100 * 1024, 200 * 1024), grad.dtype, grad.device, waits=False)
    for start in (0, 100 * 1024):
        norm.put(grad[start : start + 100 * 1024], start)
    assert norm.total().equal(without_waiting(grad))
    assert norm.total() == torch.inf


# --- the norm that has the same bits everywhere -----------------------------------------------------------------------


def portable_sizes() -> list[int]:
    return [0, 1, 2, 5, 1000, 2**18 - 1, 2**18, 2**18 + 3, 2**19 + 4097]


@pytest.mark.parametrize("numel", portable_sizes())
def test_portable_squared_norm_has_the_bits_of_its_definition(numel: int) -> None:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    squares = grad.numpy().astype(np.float64) ** 2
    width = max(1, min(numel, 2**18))
    sums = np.zeros(width)
    for start in range(0, numel, width):
        part = squares[start : start + width]
        sums[: len(part)] += part
    while len(sums) > 1:
        half = -(-len(sums) // 2)
        sums[: len(sums) - half] += sums[half:]
        sums = sums[:half]
    found = portable_squared_norm(grad)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == sums[0]
    torch.testing.assert_close(found, grad.double().square().sum(), rtol=1e-12, atol=0)


def test_portable_squared_norm_with_any_number_of_threads_has_same_bits() -> None:
    grad = torch.randn(2**20 + 4097, generator=torch.Generator().manual_seed(0))
    results = set()
    for num_threads in (1, 2, 3, 8):
        torch.set_num_threads(num_threads)
        results.add(portable_squared_norm(grad).item())
    assert len(results) == 1


@pytest.mark.parametrize("place", [0, 2**18 - 1, 2**18 + 5, 2**19 + 2])
def test_portable_squared_norm_is_finite_only_if_all_elements_are(place: int) -> None:
    grad = torch.full((2**19 + 3,), torch.finfo(torch.float32).max)
    assert portable_squared_norm(grad).isfinite()
    grad[place] = -torch.inf
    assert portable_squared_norm(grad).item() == torch.inf
    grad[7] = torch.nan
    assert portable_squared_norm(grad).isnan()


@pytest.mark.parametrize(
    ("numel", "piece_numel"), [(0, 7), (5, 7), (21, 7), (2**20 + 3, 2**17), (2**21 + 9, 2**18 + 5)]
)
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_norms_of_pieces_have_the_bits_of_a_norm_of_each(
    numel: int, piece_numel: int, as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).square_()
    pieces = torch.split(grad, piece_numel)
    expected = [portable_squared_norm(piece).item() for piece in pieces]
    if as_on_a_gpu:
        monkeypatch.setattr(grad_norm, "_is_on_gpu", lambda tensor: True)
    found = portable_squared_norms(grad, piece_numel)
    assert [norm.item() for norm in found] == expected
    assert all((norm.dtype, norm.shape) == (torch.float64, ()) for norm in found)


def test_norms_of_pieces_on_a_gpu_take_few_launches_and_stay_in_their_scratch() -> None:
    numel, num_pieces = 2**24, 8
    grad = torch.empty(num_pieces * numel + 5, device=GPU)
    with no_host_waits() as launches:
        assert len(portable_squared_norms(grad, numel)) == num_pieces + 1
    assert launches.max_nbytes <= NORM_SCRATCH_NBYTES
    # Two groups of four pieces, each with one launch for 256 Ki elements of each piece. Then the sums are halved.
    assert launches.num_launches <= 2 * (numel // 2**18) + 3 * 25


def test_portable_squared_norm_on_a_gpu_makes_no_host_wait_and_stays_in_its_scratch() -> None:
    grad = torch.empty(2**24, device=GPU)
    with no_host_waits() as launches:
        portable_squared_norm(grad)
    assert launches.max_nbytes <= NORM_SCRATCH_NBYTES


@pytest.mark.gpu
def test_portable_squared_norm_on_a_gpu_has_the_bits_of_a_cpu() -> None:
    for numel in portable_sizes():
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 10 ** float(numel % 7)
        assert portable_squared_norm(grad.cuda()).item() == portable_squared_norm(grad).item()
        piece_numel = max(1, numel // 6)
        on_gpu, on_cpu = (portable_squared_norms(each, piece_numel) for each in (grad.cuda(), grad))
        assert [norm.item() for norm in on_gpu] == [norm.item() for norm in on_cpu]
