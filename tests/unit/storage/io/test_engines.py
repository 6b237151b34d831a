import errno
import gc
import mmap
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from windlass.storage.integrity.checksum import GRANULE_NBYTES
from windlass.storage.io import engines as transfers
from windlass.storage.io.engines import (
    DEFAULT_IO,
    Backend,
    IoSettings,
    ShortTransfer,
    Transfer,
    TransferEngine,
    UringRefused,
    open_engine,
    uring_refusal,
)

DEPTH = 4
PAGE_NBYTES = 4096
Opener = Callable[[object], TransferEngine]
Aligned = Callable[[bytes], memoryview]


@dataclass
class Device:
    """A descriptor; `most_nbytes` limits the bytes of one call."""

    data_fd: int
    most_nbytes: int | None = None

    def read(self, offset: int, buffer: memoryview) -> int:
        return os.preadv(self.data_fd, [buffer[: self.most_nbytes]], offset)

    def write(self, offset: int, buffer: memoryview) -> int:
        return os.pwritev(self.data_fd, [buffer[: self.most_nbytes]], offset)


def settings(backend: Backend, depth: int = DEPTH) -> IoSettings:
    depth = 1 if backend is Backend.THREADS else depth
    return IoSettings(backend=backend, num_threads=1, depth=depth, piece_nbytes=GRANULE_NBYTES)


def need_uring() -> None:
    if refusal := uring_refusal():
        pytest.skip(f"no io_uring here: {refusal}")


@pytest.fixture
def uring() -> Iterator[Callable[[int], TransferEngine]]:
    """Opens io_uring engines on a descriptor."""
    need_uring()
    engines = []

    def open_one(fd: int) -> TransferEngine:
        engines.append(open_engine(Device(fd), settings(Backend.URING)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture(params=list(Backend))
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param is Backend.URING:
        need_uring()
    return Backend(request.param)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A read end, in which bytes arrive when the test writes them, and a write end."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        with suppress(OSError):  # the test may have closed it
            os.close(fd)


@pytest.fixture
def data_fd(tmp_path: Path, direct: bool) -> Iterator[int]:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
    yield fd
    os.close(fd)


def finish(engine: TransferEngine) -> list[Transfer]:
    """Waits for all transfers in flight."""
    finished: list[Transfer] = []
    while engine.num_in_flight:
        some = engine.wait(60.0)
        assert some, "nothing completed within 60 s"
        finished += some
    return finished


def transfer_one(engine: TransferEngine, transfer: Transfer) -> Transfer:
    engine.submit(transfer)
    assert finish(engine) == [transfer]
    return transfer


def read(offset: int, buffer: memoryview, tag: object = None) -> Transfer:
    return Transfer(is_read=True, offset=offset, buffer=buffer, tag=tag)


def write(offset: int, buffer: memoryview, tag: object = None) -> Transfer:
    return Transfer(is_read=False, offset=offset, buffer=buffer, tag=tag)


# --- both backends -------------------------------------------------------------------------------------------------


def test_bytes_come_back_as_they_were_written(backend: Backend, data_fd: int, aligned: Aligned) -> None:
    engine = open_engine(Device(data_fd), settings(backend))
    contents = [random.Random(i).randbytes(GRANULE_NBYTES + i * PAGE_NBYTES) for i in range(9)]
    places = [2 * i * GRANULE_NBYTES for i in (3, 0, 8, 5, 1, 7, 2, 6, 4)]
    moved: dict[bool, list[object]] = {True: [], False: []}
    buffers = [aligned(bytes(len(content))) for content in contents]
    for is_read in (False, True):
        for i, place in enumerate(places):
            buffer = buffers[i] if is_read else aligned(contents[i])
            if engine.num_in_flight == engine.depth:
                moved[is_read] += [each.tag for each in engine.wait(60.0)]
            engine.submit(Transfer(is_read=is_read, offset=place, buffer=buffer, tag=i))
        finished = finish(engine)
        assert all(each.error is None for each in finished)
        moved[is_read] += [each.tag for each in finished]
        assert sorted(moved[is_read], key=str) == list(range(9))
    engine.close()
    for i, place in enumerate(places):
        assert os.preadv(data_fd, [check := aligned(bytes(len(contents[i])))], place) == len(contents[i])
        assert check == contents[i]
        assert buffers[i] == contents[i]


def test_no_more_than_depth_are_in_flight_and_room_comes_back(backend: Backend, data_fd: int, aligned: Aligned) -> None:
    engine = open_engine(Device(data_fd), settings(backend))
    assert engine.num_in_flight == 0
    for i in range(engine.depth):
        engine.submit(write(i * PAGE_NBYTES, aligned(bytes(PAGE_NBYTES))))
    assert engine.num_in_flight == engine.depth
    with pytest.raises(ValueError, match=f"^{engine.depth} transfers are in flight"):
        engine.submit(write(0, aligned(bytes(PAGE_NBYTES))))
    assert len(finish(engine)) == engine.depth
    engine.submit(write(0, aligned(bytes(PAGE_NBYTES))))
    assert len(finish(engine)) == 1
    engine.close()


def test_wait_without_transfers_in_flight_is_refused(backend: Backend, data_fd: int) -> None:
    engine = open_engine(Device(data_fd), settings(backend))
    with pytest.raises(ValueError, match="nothing is in flight"):
        engine.wait(None)
    engine.close()


def test_a_file_that_ends_is_a_short_transfer(backend: Backend, data_fd: int, aligned: Aligned) -> None:
    os.ftruncate(data_fd, 3 * PAGE_NBYTES)
    engine = open_engine(Device(data_fd), settings(backend))
    done = transfer_one(engine, read(PAGE_NBYTES, aligned(b"\xff" * 4 * PAGE_NBYTES)))
    assert isinstance(done.error, ShortTransfer)
    assert (done.error.offset, done.error.moved_nbytes, done.error.nbytes) == (4096, 8192, 16384)
    assert str(done.error) == ("of 16384 bytes at 4096 only 8192 could be read: the file or device ends there")
    assert transfer_one(engine, read(0, aligned(bytes(PAGE_NBYTES)))).error is None
    engine.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_failure_is_in_the_transfer(backend: Backend, aligned: Aligned) -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    engine = open_engine(Device(fd), settings(backend))
    failed = transfer_one(engine, write(0, aligned(bytes(PAGE_NBYTES))))
    assert isinstance(failed.error, OSError)
    assert failed.error.errno == errno.ENOSPC
    assert transfer_one(engine, read(0, aligned(b"x" * PAGE_NBYTES))).error is None
    engine.close()
    os.close(fd)


def test_closing_twice_is_harmless(backend: Backend, data_fd: int, aligned: Aligned) -> None:
    engine = open_engine(Device(data_fd), settings(backend))
    engine.submit(write(0, aligned(bytes(PAGE_NBYTES))))
    engine.close()
    assert engine.num_in_flight == 0
    engine.close()


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_go_through_the_device_until_all_is_moved(data_fd: int, aligned: Aligned) -> None:
    engine = open_engine(Device(data_fd, most_nbytes=PAGE_NBYTES), settings(Backend.THREADS))
    content = random.Random(0).randbytes(5 * PAGE_NBYTES)
    assert transfer_one(engine, write(PAGE_NBYTES, aligned(content))).error is None
    back = aligned(bytes(len(content)))
    assert transfer_one(engine, read(PAGE_NBYTES, back)).error is None
    assert back == content


def test_threads_report_a_device_that_takes_no_more(data_fd: int, aligned: Aligned) -> None:
    engine = open_engine(Device(data_fd, most_nbytes=0), settings(Backend.THREADS))
    error = transfer_one(engine, write(PAGE_NBYTES, aligned(bytes(PAGE_NBYTES)))).error
    assert isinstance(error, ShortTransfer)
    assert str(error).endswith("only 0 could be written: the file or device takes no more bytes there")


# --- io_uring ------------------------------------------------------------------------------------------------------


def test_uring_continues_partial_transfers(uring: Callable[[int], TransferEngine], pipe: tuple[int, int]) -> None:
    engine = uring(pipe[0])
    content = random.Random(0).randbytes(1000)
    transfer = read(0, memoryview(bytearray(1000)))
    engine.submit(transfer)
    for part in (content[:1], content[1:600], content[600:999]):
        os.write(pipe[1], part)
        assert engine.wait(0.02) == []
    os.write(pipe[1], content[999:])
    assert engine.wait(60.0) == [transfer]
    assert transfer.error is None
    assert transfer.buffer == content


def test_uring_reports_an_end_after_a_part(uring: Callable[[int], TransferEngine], pipe: tuple[int, int]) -> None:
    engine = uring(pipe[0])
    os.write(pipe[1], b"123")
    os.close(pipe[1])
    error = transfer_one(engine, read(0, memoryview(bytearray(8)))).error
    assert isinstance(error, ShortTransfer)
    assert error.moved_nbytes == 3


def test_uring_waits_no_longer_than_asked(uring: Callable[[int], TransferEngine], pipe: tuple[int, int]) -> None:
    engine = uring(pipe[0])
    transfer = read(0, memoryview(bytearray(1)))
    engine.submit(transfer)
    assert engine.wait(0.0) == []
    assert engine.wait(0.01) == []
    assert engine.num_in_flight == 1
    os.write(pipe[1], b"1")
    assert engine.wait(None) == [transfer]


def test_uring_returns_what_completes_without_waiting_for_the_rest(
    uring: Callable[[int], TransferEngine], pipe: tuple[int, int]
) -> None:
    engine = uring(pipe[0])
    two = [read(0, memoryview(bytearray(1)), tag=i) for i in range(2)]
    for transfer in two:
        engine.submit(transfer)
    os.write(pipe[1], b"1")
    first = engine.wait(60.0)
    assert len(first) == 1
    assert engine.num_in_flight == 1
    os.write(pipe[1], b"2")
    assert {id(each) for each in first + engine.wait(60.0)} == {id(each) for each in two}


def test_other_threads_run_while_uring_waits(uring: Callable[[int], TransferEngine], pipe: tuple[int, int]) -> None:
    engine = uring(pipe[0])
    engine.submit(read(0, memoryview(bytearray(1))))
    go = threading.Event()
    other = threading.Thread(target=lambda: go.wait() and os.write(pipe[1], b"1"))
    other.start()
    go.set()
    finished = engine.wait(30.0)  # if the GIL were held, no thread could write
    other.join()
    assert len(finished) == 1


def test_uring_keeps_a_buffer_until_the_bytes_are_in_it(
    uring: Callable[[int], TransferEngine], pipe: tuple[int, int]
) -> None:
    engine = uring(pipe[0])
    memory = mmap.mmap(-1, PAGE_NBYTES)
    engine.submit(read(0, memoryview(memory)[:3]))
    with pytest.raises(BufferError):
        memory.close()
    os.write(pipe[1], b"123")
    finished = engine.wait(60.0)
    assert memory[:3] == b"123"
    finished.clear()
    memory.close()  # nothing holds it any longer


def test_uring_with_reused_buffers_leaks_nothing(
    uring: Callable[[int], TransferEngine], data_fd: int, aligned: Aligned
) -> None:
    engine = uring(data_fd)
    buffer = aligned(bytes(4 * PAGE_NBYTES))

    def num_views() -> int:
        gc.collect()
        return sum(type(each) is memoryview for each in gc.get_objects())

    def write_pages() -> None:
        for place in range(0, 4 * PAGE_NBYTES, PAGE_NBYTES):
            transfer_one(engine, write(place, buffer[place : place + PAGE_NBYTES]))

    write_pages()
    before = num_views()
    write_pages()
    write_pages()
    assert num_views() == before


def test_closing_uring_waits_for_what_is_in_flight(
    uring: Callable[[int], TransferEngine], pipe: tuple[int, int]
) -> None:
    engine = uring(pipe[0])
    buffer = memoryview(bytearray(3))
    engine.submit(read(0, buffer))
    late = threading.Timer(0.05, os.write, (pipe[1], b"123"))
    late.start()
    engine.close()
    late.join()
    assert buffer == b"123"


class Interrupting:
    """A liburing whose next results are the given errors, regardless of the kernel's."""

    def __init__(self, codes: list[int]) -> None:
        self.real = transfers._import_liburing()
        self.codes = codes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def io_uring_peek_cqe(self, ring: object, completion: "InterruptingCompletion") -> None:
        self.real.io_uring_peek_cqe(ring, completion.real)

    def io_uring_cqe_seen(self, ring: object, entry: "InterruptingEntry") -> None:
        self.real.io_uring_cqe_seen(ring, entry.real)

    def Cqe(self) -> "InterruptingCompletion":
        return InterruptingCompletion(self.real.Cqe(), self.codes)


@dataclass
class InterruptingCompletion:
    real: Any
    codes: list[int]

    def __getitem__(self, index: int) -> "InterruptingEntry":
        return InterruptingEntry(self.real[index], self.codes)


@dataclass
class InterruptingEntry:
    real: Any
    codes: list[int]

    @property
    def user_data(self) -> int:
        return int(self.real.user_data)

    @property
    def res(self) -> int:
        if self.codes:
            code = self.codes.pop()
            raise OSError(code, os.strerror(code))
        return int(self.real.res)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO])
def test_uring_retries_temporary_errors(
    code: int, data_fd: int, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_uring()
    codes = [code, code]
    binding = Interrupting(codes)
    monkeypatch.setattr(transfers, "_import_liburing", lambda: binding)
    engine = open_engine(Device(data_fd), settings(Backend.URING))
    done = transfer_one(engine, write(0, aligned(bytes(PAGE_NBYTES))))
    if code == errno.EIO:
        assert isinstance(done.error, OSError)
        assert done.error.errno == errno.EIO
        assert len(codes) == 1
    else:
        assert done.error is None
        assert codes == []
    engine.close()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
def test_uring_resubmits_entries_that_the_kernel_did_not_accept(
    code: int, uring: Callable[[int], TransferEngine], data_fd: int, aligned: Aligned, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = uring(data_fd)
    liburing = transfers._import_liburing()
    submit = liburing.io_uring_submit
    refusals = [code] * 5

    def refuse_first(ring: object) -> Any:
        if refusals:
            raise OSError(refusals.pop(), "not now")
        return submit(ring)

    monkeypatch.setattr(liburing, "io_uring_submit", refuse_first)
    done = transfer_one(engine, write(0, aligned(b"x" * PAGE_NBYTES)))
    assert done.error is None
    assert refusals == []
    assert os.fstat(data_fd).st_size == PAGE_NBYTES


def test_uring_works_in_another_thread_than_opened_it(
    uring: Callable[[int], TransferEngine], data_fd: int, aligned: Aligned
) -> None:
    engines = [uring(data_fd) for _ in range(3)]
    failures: list[object] = []

    def work(i: int) -> None:
        content = random.Random(i).randbytes(GRANULE_NBYTES)
        back = aligned(bytes(GRANULE_NBYTES))
        for repeat in range(20):
            place = (i * 20 + repeat) * GRANULE_NBYTES
            failures.extend([transfer_one(engines[i], write(place, aligned(content))).error])
            failures.extend([transfer_one(engines[i], read(place, back)).error])
            failures.extend([None if back == content else f"{i}, {repeat}: other bytes"])
        engines[i].close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [None] * 180


# --- refused io_uring ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "disabled", "said"),
    [
        (errno.EPERM, "2", r"kernel\.io_uring_disabled is 2"),
        (errno.EPERM, "0", "seccomp"),
        (errno.ENOSYS, "0", "the kernel has no io_uring"),
        (errno.ENOMEM, "0", "ulimit -l"),
        (errno.EMFILE, "0", "cannot be set up: .*Too many open files"),
    ],
)
def test_a_refusal_says_why(code: int, disabled: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        Ring = object

        @staticmethod
        def io_uring_queue_init(depth: int, ring: object) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(transfers, "_import_liburing", Refusing)
    monkeypatch.setattr(Path, "read_text", lambda path: disabled + "\n")
    monkeypatch.setattr(Path, "exists", lambda path: True)
    with pytest.raises(UringRefused, match=said):
        open_engine(Device(0), settings(Backend.URING))
    refusal = uring_refusal()
    assert refusal is not None
    with pytest.raises(UringRefused, match=said):
        raise UringRefused(refusal)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    refusal = uring_refusal()
    assert refusal is not None
    assert "liburing cannot be imported" in refusal
    assert "extra `uring`" in refusal
    assert open_engine(Device(0), DEFAULT_IO).depth == 1  # threads need no package


UNDER_SECCOMP = """
import ctypes, struct, sys
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7fff0000)]
code = b"".join(struct.pack("HBBI", *each) for each in filters)  # io_uring_setup: EPERM; all others allowed
program = struct.pack("HP", len(filters), ctypes.addressof(kept := ctypes.create_string_buffer(code)))
libc = ctypes.CDLL(None)
libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong)
if libc.prctl(38, 1, None, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
from windlass.storage.io.engines import uring_refusal
print(uring_refusal())
"""


def test_a_container_that_forbids_it_is_noticed() -> None:
    need_uring()
    done = subprocess.run(
        [sys.executable, "-c", UNDER_SECCOMP], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 77:
        pytest.skip("seccomp filters cannot be set here")
    assert done.returncode == 0, done.stderr
    assert "seccomp" in done.stdout


# --- settings and errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_threads": 0}, "at least one thread"),
        ({"depth": 0}, "at least one thread and one transfer"),
        ({"backend": Backend.THREADS, "depth": 2}, "one transfer in flight, not 2"),
        ({"piece_nbytes": 0}, "positive multiple of 1048576"),
        ({"piece_nbytes": -GRANULE_NBYTES}, "positive multiple of 1048576"),
        ({"piece_nbytes": GRANULE_NBYTES + 4096}, "not 1052672"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    good = {"backend": Backend.URING, "num_threads": 2, "depth": 4, "piece_nbytes": GRANULE_NBYTES}
    assert IoSettings(**good).depth == 4
    with pytest.raises(ValueError, match=said):
        IoSettings(**(good | changes))


@pytest.mark.parametrize("error", [ShortTransfer(True, 4096, 0, 8192), UringRefused("no")])
def test_errors_cross_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
