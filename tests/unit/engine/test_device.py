import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from windlass.engine.device import Device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return Device(torch.device(request.param))


def test_buffers_are_reused_by_size_and_type(device: Device) -> None:
    buffer = device.take(10, torch.float32)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((10,), torch.float32, device.device.type)
    other = device.take(10, torch.float32)
    assert other.data_ptr() != buffer.data_ptr()
    device.give(buffer)
    assert device.take(10, torch.bfloat16) is not buffer
    assert device.take(11, torch.float32) is not buffer
    assert device.take(10, torch.float32) is buffer


@pytest.mark.parametrize("dtype", TYPES)
def test_released_buffers_are_poisoned_when_asked(dtype: torch.dtype) -> None:
    for poison in (False, True):
        device = Device(torch.device("cpu"), poison_released=poison)
        buffer = device.take(5, dtype).fill_(2.0)
        device.give(buffer)
        assert buffer.isnan().all() if poison else (buffer == 2.0).all()


@pytest.mark.parametrize("numel", [0, 1, 4097])
@pytest.mark.parametrize("dtype", TYPES)
def test_copies_are_done_when_they_return(device: Device, numel: int, dtype: torch.dtype) -> None:
    host = torch.randn(numel).to(dtype)
    expected = host.clone()
    buffer = device.take(numel, dtype)
    device.copy_in(buffer, host)
    host.fill_(torch.nan)
    back = torch.empty(numel, dtype=dtype)
    device.copy_out(back, buffer)
    buffer.fill_(torch.nan)
    assert torch.equal(back, expected)


def test_a_copy_in_keeps_every_bit() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # every bf16, NaNs included
    device = Device(torch.device("cpu"))
    target = device.take(2**16, torch.bfloat16)
    device.copy_in(target, bits)
    assert torch.equal(target.view(torch.int16), bits.view(torch.int16))


def test_a_copy_out_rounds_to_the_targets_type(device: Device) -> None:
    source = torch.randn(1000, device=device.device)
    target = torch.empty(1000, dtype=torch.bfloat16)
    device.copy_out(target, source)
    assert torch.equal(target, source.cpu().to(torch.bfloat16))


def test_threads_never_share_a_buffer() -> None:
    device = Device(torch.device("cpu"))
    in_use: set[int] = set()
    lock = threading.Lock()

    def work(_: int) -> None:
        for _ in range(200):
            buffer = device.take(8, torch.float32)
            with lock:
                assert buffer.data_ptr() not in in_use
                in_use.add(buffer.data_ptr())
            with lock:
                in_use.remove(buffer.data_ptr())
            device.give(buffer)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_pinning_is_for_gpus(device: Device) -> None:
    memory = torch.zeros(2**20, dtype=torch.uint8)
    device.pin(memory)
    assert memory.is_pinned() == device.is_cuda
    device.unpin(memory)
    device.synchronize()
