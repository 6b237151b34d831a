import threading
from collections.abc import Iterator
from functools import partial
from itertools import permutations

import pytest
import torch

from tests.support.late_streams import LateStreams
from windlass.engine.device import buffer_pool
from windlass.engine.device import device as device_module
from windlass.engine.device.buffer_pool import DeviceBuffers, narrowed, round_in_place
from windlass.engine.device.device import Device
from windlass.storage.cancellation import CancelToken

DEADLINE_S = 20.0
F32 = torch.float32


def make_buffers(device: Device, num_buffers: int = 1) -> DeviceBuffers:
    return DeviceBuffers(device, {(3, F32): num_buffers}, name="params")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device(torch.device(request.param), poison_released=True)
    yield device
    device.token.cancel()


def test_pool_has_planned_number_of_buffers() -> None:
    device = Device(torch.device("cpu"), token=CancelToken(0.01))
    planned = {(3, F32): 2, (3, torch.bfloat16): 1, (0, F32): 1}
    buffers = DeviceBuffers(device, planned, name="params")
    found = [
        buffers.take(numel, dtype, device.h2d) for (numel, dtype), number in planned.items() for _ in range(number)
    ]
    assert [(each.numel(), each.dtype) for each in found] == [(3, F32), (3, F32), (3, torch.bfloat16), (0, F32)]
    assert found[0].data_ptr() != found[1].data_ptr()
    for numel, dtype in (*planned, (4, F32)):
        with pytest.raises(
            TimeoutError, match=rf"waited 0\.01 s for a buffer of {numel} elements in {dtype} for params"
        ):
            buffers.take(numel, dtype, device.h2d)


def test_released_buffer_is_reused(device: Device) -> None:
    buffers = make_buffers(device, 2)
    first, second = (buffers.take(3, F32, device.h2d) for _ in range(2))
    buffers.give(second, device.compute)
    buffers.give(first, device.compute)
    assert buffers.take(3, F32, device.h2d) is second  # the one that has been free for longest


def test_acquire_waits_until_a_buffer_is_released(device: Device) -> None:
    buffers = make_buffers(device)
    buffer, found = buffers.take(3, F32, device.h2d), []
    waiting = threading.Thread(target=lambda: found.append(buffers.take(3, F32, device.h2d)))
    waiting.start()
    waiting.join(0.05)
    assert found == []
    buffers.give(buffer, device.compute)
    waiting.join(DEADLINE_S)
    assert found == [buffer]


def test_cancel_ends_the_waits(device: Device) -> None:
    buffers = make_buffers(device)
    buffers.take(3, F32, device.h2d)
    threading.Timer(0.05, device.token.cancel).start()
    with pytest.raises(InterruptedError, match="the job was stopped"):
        buffers.take(3, F32, device.h2d)


@pytest.mark.parametrize("poison", [True, False])
def test_released_buffers_are_poisoned_when_asked(poison: bool) -> None:
    device = Device(torch.device("cpu"), poison_released=poison)
    buffers = make_buffers(device)
    buffer = buffers.take(3, F32, device.h2d).fill_(2.0)
    buffers.give(buffer, device.compute)
    assert buffer.isnan().all() if poison else (buffer == 2.0).all()


def test_released_contents_are_found_until_the_buffer_is_needed_for_others(device: Device) -> None:
    buffers = make_buffers(device)
    buffer, is_filled = buffers.take_with("a", 3, F32, device.h2d)
    assert not is_filled
    device.h2d.run(lambda: buffer.fill_(2.0))
    assert buffers.take_with("a", 3, F32, device.h2d) == (buffer, True)
    for _ in range(2):
        buffers.give(buffer, device.compute)
    found, is_filled = buffers.take_with("a", 3, F32, device.h2d)
    assert found is buffer
    assert is_filled
    device.h2d.record().wait()
    assert buffer.tolist() == [2.0] * 3
    buffers.give(buffer, device.compute)
    assert buffers.take_with("b", 3, F32, device.h2d) == (buffer, False)
    device.h2d.record().wait()
    assert buffer.isnan().all()  # a late read of the evicted contents shows


def late_device(monkeypatch: pytest.MonkeyPatch, order: object, **options: object) -> tuple[Device, LateStreams]:
    """A device whose streams run as late as possible, with released buffers filled with NaN."""
    streams: list[LateStreams] = []

    def open_streams(device: torch.device, token: CancelToken, start_threads: object) -> LateStreams:
        streams.append(LateStreams(start_threads, token=token, order=order, **options))  # type: ignore[arg-type]
        return streams[-1]

    monkeypatch.setattr(device_module, "open_streams", open_streams)
    return Device(torch.device("cpu"), poison_released=True), streams[0]


def read_contents(device: Device, contents: str) -> list[list[float]]:
    """The values that the compute stream reads in one of two buffers, filled with each letter's code by copies."""
    buffers, seen = make_buffers(device, 2), list[list[float]]()
    for letter in contents:
        buffer, is_filled = buffers.take_with(letter, 3, F32, device.h2d)
        if not is_filled:
            device.h2d.run(partial(buffer.fill_, float(ord(letter))))
        device.compute.wait(device.h2d.record())
        device.compute.run(lambda buffer=buffer: seen.append(buffer.tolist()))
        buffers.give(buffer, device.compute)
    device.compute.record().wait()
    device.token.cancel()
    return seen


@pytest.mark.parametrize("order", [*permutations(("compute", "h2d", "d2h")), 3], ids=str)
def test_contents_are_read_before_they_are_evicted(order: object, monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = late_device(monkeypatch, order)
    contents = "abbacaacbbcab"
    assert read_contents(device, contents) == [[float(ord(letter))] * 3 for letter in contents]


@pytest.mark.parametrize("forgotten", [("h2d", "compute"), ("compute", "h2d")], ids="-".join)
def test_contents_with_a_missing_wait_are_not_read(forgotten: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    order = (forgotten[0], "d2h", forgotten[1])
    device, _ = late_device(monkeypatch, order, forgets=lambda *pair: pair == forgotten)
    contents = "abc"
    assert read_contents(device, contents) != [[float(ord(letter))] * 3 for letter in contents]


@pytest.mark.parametrize("order", [*permutations(("compute", "h2d", "d2h")), 3], ids=str)
def test_streams_wait_for_what_used_a_buffer_before(order: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that passes a buffer between streams does not wait, and the fill with NaN comes in between."""
    device, streams = late_device(monkeypatch, order)
    buffers = make_buffers(device)
    seen: list[list[float]] = []
    chain = (device.h2d, device.compute, device.d2h) * 3
    for i, stream in enumerate(chain):
        buffer = buffers.take(3, F32, stream)
        stream.run(lambda buffer=buffer: seen.append(buffer.tolist()))
        stream.run(partial(buffer.fill_, float(i)))
        stream.run(lambda buffer=buffer: seen.append(buffer.tolist()))
        buffers.give(buffer, stream)
    assert not streams.host_waits
    chain[-1].record().wait()
    device.token.cancel()
    poisoned, written = seen[::2], seen[1::2]
    assert all(value != value for values in poisoned for value in values)
    assert written == [[float(i)] * 3 for i in range(len(chain))]


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_in_place_has_the_bits_of_rounding(
    device: Device, dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_pool, "ROUNDING_NUMEL", 8)
    values = torch.randn(numel, device=device.device) * 10.0 ** torch.randint(-9, 9, (numel,), device=device.device)
    values[:1] = torch.inf
    expected, target = values.to(dtype), narrowed(values, dtype)
    round_in_place(values, target)
    assert target.data_ptr() == values.data_ptr()
    assert torch.equal(target, expected)


def test_the_start_of_a_buffer_is_released_instead_of_it(device: Device) -> None:
    buffers = DeviceBuffers(device, {(3, F32): 1, (2, F32): 1, (2, torch.float16): 1}, name="gradients")
    wide = buffers.take(3, F32, device.compute)
    narrow = buffers.narrow(wide, torch.float16)
    assert (narrow.data_ptr(), narrow.numel()) == (wide.data_ptr(), 3)
    buffers.give(narrow, device.compute)
    device.compute.record().wait()
    assert wide.isnan().all()
    assert buffers.take(3, torch.float16, device.compute) is narrow  # because no buffer of this class is planned
    buffers.give(narrow, device.compute)
    assert buffers.take(3, F32, device.compute) is wide
    assert buffers.take(2, torch.float16, device.compute).data_ptr() != buffers.take(2, F32, device.compute).data_ptr()
