import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.fake_cuda import CudaStatus, cuda_error_string
from tests.support.late_streams import LateStreams
from windlass.engine.device import device as device_module
from windlass.engine.device import registered_memory
from windlass.engine.device.device import Device, copy
from windlass.engine.device.registered_memory import PinError
from windlass.engine.device.streams import StartThreads
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import Span
from windlass.storage.memory.arena import Arena

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
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # every bf16, including NaNs
    device = Device(torch.device("cpu"))
    target = device.take(2**16, torch.bfloat16)
    device.copy_in(target, bits)
    assert torch.equal(target.view(torch.int16), bits.view(torch.int16))


def test_numbers_come_to_the_host(device: Device) -> None:
    found: list[torch.Tensor] = []
    values = [torch.tensor(value, device=device.device) for value in (1.5, 3, True)]
    values.append(torch.tensor(1 / 3, dtype=torch.float64, device=device.device))
    device.compute.run(lambda: found.append(device.download(values)))
    device.synchronize()
    assert found[0].dtype is torch.float64
    assert found[0].tolist() == [1.5, 3.0, 1.0, 1 / 3]


def test_upload_keeps_values(device: Device) -> None:
    host = torch.arange(100)
    found: list[torch.Tensor] = []
    device.compute.run(lambda: found.append(device.upload(host)))
    device.synchronize()
    assert found[0].device.type == device.device.type
    assert torch.equal(found[0].cpu(), host)


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


def test_a_thread_that_waits_ends_without_an_error_when_the_token_is_cancelled() -> None:
    """Pytest fails the test if the thread raises."""
    token, before = CancelToken(30.0), threading.enumerate()
    device = Device(torch.device("cpu"), token=token)
    one, other = device.open_stream(), device.open_stream()
    gate = threading.Event()
    one.run(gate.wait)
    other.wait(one.record())
    _, waiting = (thread for thread in threading.enumerate() if thread not in before)
    while not token.describe_waits().get(waiting):
        time.sleep(0.001)
    token.cancel()
    waiting.join(30)
    assert not waiting.is_alive()
    gate.set()


@pytest.fixture
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device whose streams run late, in the order of `request.param`."""

    def open_streams(device: torch.device, token: CancelToken, start_threads: StartThreads) -> LateStreams:
        return LateStreams(start_threads, token=token, order=request.param)

    monkeypatch.setattr(device_module, "open_streams", open_streams)
    device = Device(torch.device("cpu"), poison_released=True, token=CancelToken(20.0))
    yield device
    device.token.cancel()


@contextmanager
def held_up(late: Device) -> Iterator[None]:
    """Blocks all streams inside the block."""
    streams = late._streams
    assert isinstance(streams, LateStreams)
    streams.is_held_up = True
    yield
    streams.is_held_up = False


LATE_ORDERS = pytest.mark.parametrize(
    "late", [("h2d", "d2h", "compute"), ("d2h", "h2d", "compute"), ("compute", "h2d", "d2h")], indirect=True
)


@LATE_ORDERS
def test_take_of_new_buffer_has_copies_in_wait_for_the_work_before(late: Device) -> None:
    """The allocator may give it the memory of a tensor that queued work still reads."""
    done: list[str] = []
    with held_up(late):
        late.compute.run(lambda: done.append("compute"))
        late.take(8, torch.float32)
        late.h2d.run(lambda: done.append("h2d"))
        copied = late.h2d.record()
    copied.wait()
    assert done == ["compute", "h2d"]


@LATE_ORDERS
def test_release_returns_once_buffer_is_filled(late: Device) -> None:
    """Otherwise the fill with NaN would overwrite the data that the next user copies in."""
    buffer = late.take(8, torch.float32)
    late.give(buffer)
    assert late.take(8, torch.float32) is buffer
    late.copy_in(buffer, torch.ones(8))
    late.synchronize()
    assert torch.equal(buffer, torch.ones(8))


@LATE_ORDERS
def test_copies_on_late_streams_are_done_when_they_return(late: Device) -> None:
    buffer, host, back = torch.empty(8), torch.ones(8), torch.empty(8)
    late.copy_in(buffer, host)
    host.fill_(torch.nan)
    late.copy_out(back, buffer)
    buffer.fill_(torch.nan)
    assert torch.equal(back, torch.ones(8))


@LATE_ORDERS
def test_waits_for_the_compute_stream_return_when_its_work_is_done(late: Device) -> None:
    done: list[int] = []
    late.compute.run(lambda: done.append(1))
    late.synchronize()
    assert done == [1]
    late.compute.run(lambda: done.append(2))
    late.compute.record().wait()
    assert done == [1, 2]


@LATE_ORDERS
def test_fill_with_nan_runs_after_earlier_work_of_the_stream(late: Device) -> None:
    buffer, seen = torch.ones(8), torch.empty(8)
    with held_up(late):
        late.compute.run(lambda: seen.copy_(buffer))
        late.poison(buffer, late.compute)
        assert torch.equal(buffer, torch.ones(8))
    late.synchronize()
    assert torch.equal(seen, torch.ones(8))
    assert buffer.isnan().all()


def test_copies_are_given_to_the_stream_of_their_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the compute stream they would be correct, but block the computation."""
    device, given = Device(torch.device("cpu")), []
    for name in ("compute", "h2d", "d2h"):
        stream = getattr(device, name)

        def run(work: Callable[[], object], name: str = name, run: Callable[..., None] = stream.run) -> None:
            given.append(name)
            run(work)

        monkeypatch.setattr(stream, "run", run)
    device.copy_in(torch.empty(8), torch.ones(8))
    assert given == ["h2d"]
    device.copy_out(torch.empty(8), torch.ones(8))
    assert given == ["h2d", "d2h"]


class FakeRuntime:
    """CUDA's calls, and the memory mapped at each call."""

    def __init__(self, arena_path: Path) -> None:
        self.arena_path = arena_path
        self.calls: list[tuple[str, int, int, bool]] = []
        self.result = 0
        self.num_accepted = 0  # first calls that succeed whatever `result` is

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> CudaStatus:
        self.calls.append(("register", address, nbytes, is_mapped(self.arena_path)))
        return CudaStatus(0 if len(self.calls) <= self.num_accepted else self.result)

    def cudaHostUnregister(self, address: int) -> CudaStatus:
        self.calls.append(("unregister", address, 0, is_mapped(self.arena_path)))
        return CudaStatus(self.result)

    def cudaGetErrorString(self, status: object) -> str:
        return cuda_error_string(status)


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def memory_of(arena: Arena) -> torch.Tensor:
    return torch.frombuffer(arena.buffer(Span(0, arena.nbytes)), dtype=torch.uint8)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime(tmp_path / "arena")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@pytest.fixture
def gpu(runtime: FakeRuntime) -> Device:
    """A device that calls the fake runtime."""
    device = Device(torch.device("cpu"))
    device.is_cuda = True
    return device


class TestPinning:
    def test_is_for_gpus(self, device: Device, tmp_path: Path) -> None:
        Arena.create(tmp_path / "arena", 2**20)
        arena = Arena.open(tmp_path / "arena")
        memory = memory_of(arena)
        device.pin(memory)
        assert memory.is_pinned() == device.is_cuda
        device.unpin(memory)
        assert not memory.is_pinned()
        device.pin(memory)  # it was really released
        device.unpin(memory)
        device.synchronize()

    def test_registers_the_exact_size_before_use_and_releases_before_unmapping(
        self, gpu: Device, runtime: FakeRuntime
    ) -> None:
        Arena.create(runtime.arena_path, 3 * 4096).close()
        arena = Arena.open(runtime.arena_path)
        memory = memory_of(arena)
        address = memory.data_ptr()
        gpu.pin(memory)
        gpu.unpin(memory)
        del memory
        arena.close()
        assert runtime.calls == [("register", address, 3 * 4096, True), ("unregister", address, 0, True)]
        assert not is_mapped(runtime.arena_path)

    @pytest.mark.parametrize("is_cuda", [True, False])
    def test_memory_stays_mapped_while_it_is_registered(self, gpu: Device, runtime: FakeRuntime, is_cuda: bool) -> None:
        gpu.is_cuda = is_cuda
        arena = Arena.create(runtime.arena_path, 4096)
        memory = memory_of(arena)
        gpu.pin(memory)
        same_address = SimpleNamespace(data_ptr=partial(int, memory.data_ptr()))
        del memory
        arena.close()
        arena.unlink()
        assert is_mapped(runtime.arena_path)
        gpu.unpin(same_address)  # type: ignore[arg-type]
        assert [call[3] for call in runtime.calls] == [True] * 2 * is_cuda
        assert not is_mapped(runtime.arena_path)

    def test_misuse_is_an_error(self, device: Device) -> None:
        memory = torch.zeros(2**20, dtype=torch.uint8)
        with pytest.raises(PinError, match="never pinned"):
            device.unpin(memory)
        device.pin(memory)
        with pytest.raises(PinError, match="registered already"):
            device.pin(memory)
        device.unpin(memory)
        with pytest.raises(PinError, match="unpinned before"):
            device.unpin(memory)

    def test_refused_memory_is_not_kept(self, gpu: Device, runtime: FakeRuntime) -> None:
        runtime.result = 2
        arena = Arena.create(runtime.arena_path, 4096)
        memory = memory_of(arena)
        with pytest.raises(PinError, match=r"4.00 KiB .* error 2, out of memory; lower the job's host memory budget"):
            gpu.pin(memory)
        with pytest.raises(PinError, match="not registered"):
            gpu.unpin(memory)
        del memory
        arena.close()
        assert not is_mapped(runtime.arena_path)

    def test_large_memory_is_registered_in_parts(
        self, gpu: Device, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registered_memory, "PART_NBYTES", 4096)
        memory = torch.arange(10000, dtype=torch.int32).view(torch.uint8)
        begin = memory.data_ptr()
        gpu.pin(memory)
        parts = [(begin + start, min(4096, 40000 - start)) for start in range(0, 40000, 4096)]
        assert [call[1:3] for call in runtime.calls] == parts
        # A copy is cut where parts end, also one that begins and ends within parts.
        host = memory[100:20000].view(torch.int32)
        pieces = list(registered_memory.within_parts(torch.empty(host.numel(), dtype=torch.int32, device="meta"), host))
        assert [piece.numel() * 4 for _, piece in pieces] == [3996, 4096, 4096, 4096, 3616]
        assert all(to.numel() == from_.numel() for to, from_ in pieces)
        assert pieces[1][1].data_ptr() == begin + 4096
        launches: list[int] = []
        monkeypatch.setattr(torch.Tensor, "copy_", lambda to, *_, **__: launches.append(to.nbytes))
        copy(torch.empty(host.numel(), dtype=torch.int32, device="meta"), host)
        assert launches == [3996, 4096, 4096, 4096, 3616]
        within = memory[4096:8192]
        assert [piece.numel() for piece, _ in registered_memory.within_parts(within, within)] == [4096]
        gpu.unpin(memory)
        assert [call[1] for call in runtime.calls[10:]] == [address for address, _ in parts]
        assert len(list(registered_memory.within_parts(host, host))) == 1

    def test_parts_of_refused_memory_are_released(
        self, gpu: Device, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registered_memory, "PART_NBYTES", 4096)
        runtime.result, runtime.num_accepted = 2, 2
        memory = torch.zeros(5 * 4096, dtype=torch.uint8)
        begin = memory.data_ptr()
        with pytest.raises(PinError, match=r"20.00 KiB .* error 2"):
            gpu.pin(memory)
        assert [(name, address - begin) for name, address, *_ in runtime.calls] == [
            ("register", 0),
            ("register", 4096),
            ("register", 8192),
            ("unregister", 4096),
            ("unregister", 0),
        ]
        assert len(list(registered_memory.within_parts(memory, memory))) == 1

    def test_memory_that_cannot_be_released_stays_mapped(self, gpu: Device, runtime: FakeRuntime) -> None:
        arena = Arena.create(runtime.arena_path, 4096)
        memory = memory_of(arena)
        gpu.pin(memory)
        runtime.result = 700  # an illegal access broke the context
        gpu.unpin(memory)
        del memory
        arena.close()
        assert is_mapped(runtime.arena_path)
