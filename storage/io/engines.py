"""Engines that move bytes between an SSD and memory: blocking calls in threads, or io_uring. One engine per thread.

Both reach the SSD's bandwidth from Python, because pieces are megabytes. The faster one depends on the machine (see
`calibration.py`). io_uring needs fewer threads; threads work everywhere.
"""

import ctypes
import errno
import mmap
import os
import select
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from windlass.storage.integrity import GRANULE_NBYTES


class Backend(StrEnum):
    """The I/O interface that a thread of an I/O scheduler uses."""

    THREADS = "threads"  # preadv and pwritev, one at a time in each thread
    URING = "uring"  # io_uring, several at a time in each thread


@dataclass(frozen=True, slots=True, kw_only=True)
class IoSettings:
    """The I/O settings of an SSD."""

    backend: Backend
    num_threads: int
    depth: int  # transfers in flight in each thread; 1 for THREADS
    piece_nbytes: int  # largest size of a transfer; a multiple of GRANULE_NBYTES

    def __post_init__(self) -> None:
        if self.num_threads < 1 or self.depth < 1:
            raise ValueError(f"at least one thread and one transfer in flight are needed, not {self}")
        if self.backend is Backend.THREADS and self.depth != 1:
            raise ValueError(f"a thread of the {self.backend} backend has one transfer in flight, not {self.depth}")
        if self.piece_nbytes <= 0 or self.piece_nbytes % GRANULE_NBYTES:
            raise ValueError(f"a piece must be a positive multiple of {GRANULE_NBYTES} bytes, not {self.piece_nbytes}")


DEFAULT_IO = IoSettings(backend=Backend.THREADS, num_threads=4, depth=1, piece_nbytes=4 << 20)


class BlockDevice(Protocol):
    """A file or raw device that holds the bytes. Offsets, lengths and buffer addresses are multiples of 4096."""

    @property
    def data_fd(self) -> int:
        """The descriptor for reading and writing, with O_DIRECT if the file system supports it."""

    def read(self, offset: int, buffer: memoryview) -> int:
        """Reads into `buffer` with one system call. Returns the number of bytes read, 0 at the end."""

    def write(self, offset: int, buffer: memoryview) -> int:
        """Writes from `buffer` with one system call. Returns the number of bytes written."""


class ShortTransfer(Exception):
    """The file or device ended within a transfer, or takes no more bytes."""

    def __init__(self, is_read: bool, offset: int, moved_nbytes: int, nbytes: int) -> None:
        super().__init__(is_read, offset, moved_nbytes, nbytes)
        self.is_read = is_read
        self.offset = offset
        self.moved_nbytes = moved_nbytes
        self.nbytes = nbytes

    def __str__(self) -> str:
        verb, what = ("read", "ends") if self.is_read else ("written", "takes no more bytes")
        return (
            f"of {self.nbytes} bytes at {self.offset} only {self.moved_nbytes} could be {verb}: the file or device "
            f"{what} there"
        )


class UringRefused(RuntimeError):
    """io_uring cannot be used here. The message says why and what to do."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A read or write of a writable buffer. The engine owns the buffer from `submit` until `wait` returns it."""

    is_read: bool
    offset: int
    buffer: memoryview
    tag: object  # for the caller's use
    error: OSError | ShortTransfer | None = None  # set before `wait` returns it


class TransferEngine(Protocol):
    """Runs transfers for one thread. Any thread may open it; one thread makes all other calls and closes it at its end.

    A thread that is blocked in `wait` accepts no new transfers, even if `depth` allows more. This is acceptable for an
    I/O scheduler: another of its threads is idle and accepts them, or the SSD is busy and a transfer completes soon.
    """

    @property
    def depth(self) -> int:
        """The limit of transfers in flight."""

    @property
    def num_in_flight(self) -> int:
        """The number of transfers that were submitted and that `wait` has not returned yet."""

    def submit(self, transfer: Transfer) -> None:
        """Starts a transfer. Raises ValueError if `depth` transfers are in flight."""

    def wait(self, timeout_s: float | None) -> list[Transfer]:
        """Waits for at least one completed transfer and returns all completed ones; none after `timeout_s` seconds.

        A failure is in the transfer's `error` and is never raised. Raises ValueError if nothing is in flight.
        """

    def close(self) -> None:
        """Waits until nothing is in flight, because transfers must not write to memory with a new owner, and closes.

        A transfer that `wait` has not returned may or may not have been carried out.
        """


def open_engine(device: BlockDevice, settings: IoSettings) -> TransferEngine:
    """Opens an engine for one thread, which must close it. The caller keeps the device open until then.

    Raises:
        UringRefused: the settings ask for io_uring, which cannot be used here.
    """
    if settings.backend is Backend.URING:
        return _UringEngine(device.data_fd, settings.depth)
    return _ThreadsEngine(device)


def uring_refusal() -> str | None:
    """Returns the reason why io_uring cannot be used here, None if it can. It tests a ring by reading one block."""
    content = os.urandom(mmap.PAGESIZE)
    fd = os.memfd_create("windlass-uring-probe", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, content, 0)
        engine = _UringEngine(fd, depth=1)
        probe = Transfer(is_read=True, offset=0, buffer=memoryview(bytearray(len(content))), tag=None)
        engine.submit(probe)
        if not engine.wait(_PROBE_DEADLINE_S):
            return f"io_uring did not read a block within {_PROBE_DEADLINE_S} s"  # not closed: `close` would wait too
        engine.close()
    except UringRefused as refused:
        return str(refused)
    finally:
        os.close(fd)
    if probe.error is not None or probe.buffer != content:
        return f"io_uring did not read what was written: {probe.error or 'other bytes'}"
    return None


# --- private ----------------------------------------------------------------------------------------------------------

_PROBE_DEADLINE_S = 10.0  # timeout of the test of io_uring
_RETRY_S = 0.001  # interval between attempts to submit entries for which the kernel had no memory
_TRY_AGAIN = (errno.EAGAIN, errno.EBUSY, errno.EINTR)


class _ThreadsEngine:
    """An engine that transfers bytes inside `wait`, in the calling thread. A running system call has no timeout."""

    depth = 1

    def __init__(self, device: BlockDevice) -> None:
        self._device = device
        self._submitted: Transfer | None = None

    @property
    def num_in_flight(self) -> int:
        return 0 if self._submitted is None else 1

    def submit(self, transfer: Transfer) -> None:
        _check_room(self)
        self._submitted = transfer

    def wait(self, timeout_s: float | None) -> list[Transfer]:
        transfer = self._submitted
        if transfer is None:
            raise _nothing_in_flight()
        try:
            self._move(transfer)
        except (OSError, ShortTransfer) as error:
            transfer.error = error
        finally:
            self._submitted = None
        return [transfer]

    def close(self) -> None:
        self._submitted = None

    def _move(self, transfer: Transfer) -> None:
        call = self._device.read if transfer.is_read else self._device.write
        done = 0
        while done < transfer.buffer.nbytes:
            moved = call(transfer.offset + done, transfer.buffer[done:])
            if moved == 0:
                raise ShortTransfer(transfer.is_read, transfer.offset, done, transfer.buffer.nbytes)
            done += moved


@dataclass(slots=True, eq=False)
class _Flight:
    transfer: Transfer  # keeps the buffer alive until the kernel has finished
    moved_nbytes: int = 0


class _UringEngine:
    """An engine that polls an io_uring for completions, because the binding's own waiting calls hold the GIL."""

    def __init__(self, data_fd: int, depth: int) -> None:
        self._uring = _import_liburing()
        self.depth = depth
        self._data_fd = data_fd
        self._ring = self._uring.Ring()
        try:
            self._uring.io_uring_queue_init(depth, self._ring)
        except OSError as error:
            raise UringRefused(_explain(error)) from error
        self._completion = self._uring.Cqe()
        self._poll = select.poll()
        self._poll.register(self._ring.ring_fd, select.POLLIN)
        self._flights: dict[int, _Flight] = {}
        self._iovecs: dict[tuple[int, int], object] = {}  # by address and size
        self._num_submitted = 0
        self._closed = False

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def submit(self, transfer: Transfer) -> None:
        _check_room(self)
        flight = self._flights[self._num_submitted] = _Flight(transfer)
        self._issue(self._num_submitted, flight)
        self._num_submitted += 1

    def wait(self, timeout_s: float | None) -> list[Transfer]:
        if not self._flights:
            raise _nothing_in_flight()
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._push()
            finished = self._reap()
            remaining_s = None if until_s is None else until_s - time.monotonic()
            if finished or (remaining_s is not None and remaining_s <= 0):
                return finished
            if self._uring.io_uring_sq_ready(self._ring):
                remaining_s = _RETRY_S if remaining_s is None else min(remaining_s, _RETRY_S)
            self._poll.poll(None if remaining_s is None else 1e3 * remaining_s)

    def close(self) -> None:
        if self._closed:
            return
        while self._flights:
            self.wait(None)
        self._closed = True
        self._uring.io_uring_queue_exit(self._ring)

    def _issue(self, number: int, flight: _Flight) -> None:
        """Submits the rest of a transfer."""
        transfer, done = flight.transfer, flight.moved_nbytes
        iovec = self._iovec(transfer.buffer[done:])
        entry = self._uring.io_uring_get_sqe(self._ring)
        assert entry is not None  # each flight has at most one entry, and the ring has `depth` entries
        prepare = self._uring.io_uring_prep_readv if transfer.is_read else self._uring.io_uring_prep_writev
        prepare(entry, self._data_fd, iovec, transfer.offset + done)
        # A kernel thread pins the pages: it takes 0.1 ms for 4 MiB, during which the binding would hold the GIL.
        entry.flags = self._uring.IOSQE_ASYNC
        entry.user_data = number
        self._push()

    def _iovec(self, buffer: memoryview) -> object:
        """Returns a buffer's address and size in the kernel's form.

        The binding keeps a buffer forever (seen in version 2026.3.30), so an arena would stay mapped. Therefore it gets
        the bare address. Each address is cached, because pieces use the same slots again and again.
        """
        place = (ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes)
        if place not in self._iovecs:
            holds_nothing = (ctypes.c_char * buffer.nbytes).from_address(place[0])
            self._iovecs[place] = self._uring.Iovec([memoryview(holds_nothing)])
        return self._iovecs[place]

    def _push(self) -> None:
        try:
            self._uring.io_uring_submit(self._ring)
        except OSError as error:
            if error.errno not in _TRY_AGAIN:
                raise
            # The entries stay in the ring, and `wait` submits them again.

    def _reap(self) -> list[Transfer]:
        finished = []
        for _ in range(self._uring.io_uring_cq_ready(self._ring)):  # without transfers that are submitted again here
            self._uring.io_uring_peek_cqe(self._ring, self._completion)
            entry = self._completion[0]
            number, moved, error = entry.user_data, 0, None
            try:
                moved = entry.res
            except OSError as failure:  # the binding raises a negative result
                error = failure.with_traceback(None)
            self._uring.io_uring_cqe_seen(self._ring, entry)
            flight = self._flights[number]
            flight.moved_nbytes += moved
            if self._is_finished(flight, moved, error):
                finished.append(self._flights.pop(number).transfer)
            else:
                self._issue(number, flight)
        return finished

    def _is_finished(self, flight: _Flight, moved: int, error: OSError | None) -> bool:
        transfer = flight.transfer
        if error is not None:
            if error.errno in _TRY_AGAIN:
                return False
            transfer.error = error
        elif flight.moved_nbytes < transfer.buffer.nbytes:
            if moved > 0:
                return False
            transfer.error = ShortTransfer(
                transfer.is_read, transfer.offset, flight.moved_nbytes, transfer.buffer.nbytes
            )
        return True


def _check_room(engine: TransferEngine) -> None:
    if engine.num_in_flight >= engine.depth:
        raise ValueError(f"{engine.depth} transfers are in flight, as many as there may be; wait for one first")


def _nothing_in_flight() -> ValueError:
    return ValueError("nothing is in flight, so there is nothing to wait for")


def _import_liburing() -> Any:
    try:
        import liburing
    except (ImportError, OSError, ValueError) as error:  # its import reads the kernel's version
        raise UringRefused(
            f"the Python package liburing cannot be imported ({error}); install windlass with its extra `uring`"
        ) from error
    return liburing


def _explain(error: OSError) -> str:
    match error.errno:
        case errno.EPERM | errno.EACCES:
            switch = Path("/proc/sys/kernel/io_uring_disabled")
            disabled = switch.read_text().strip() if switch.exists() else "0"
            if disabled != "0":
                return f"the system forbids io_uring: kernel.io_uring_disabled is {disabled}; 0 allows it"
            return (
                "a security filter forbids io_uring, as Docker's default seccomp profile does; allow it in the profile"
            )
        case errno.ENOSYS:
            return "the kernel has no io_uring, or a security filter hides it"
        case errno.ENOMEM:
            return "io_uring may lock too little memory; raise the limit on locked memory (ulimit -l)"
        case _:
            return f"io_uring cannot be set up: {error}"
