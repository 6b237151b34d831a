"""Finds the fastest I/O settings of an SSD by trials, and the share of chunks for each of several SSDs."""

import itertools
import math
import mmap
import os
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from windlass.storage.integrity import GRANULE_NBYTES, granule_digests
from windlass.storage.io import (
    DEFAULT_IO,
    Backend,
    BlockDevice,
    IoSettings,
    Transfer,
    TransferEngine,
    open_engine,
    uring_refusal,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The fastest settings found for an SSD, and its rates with them, checksums included."""

    io: IoSettings
    read_bytes_per_s: float  # reading only
    write_bytes_per_s: float  # writing only
    mixed_bytes_per_s: float  # reads and writes together, 12 bytes read for 14 written
    cpu_s_per_byte: float  # CPU seconds of all cores, in the kernel and on checksums
    measured_at: str  # the day in UTC, such as 2026-01-31

    def __post_init__(self) -> None:
        rates = (self.read_bytes_per_s, self.write_bytes_per_s, self.mixed_bytes_per_s)
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(f"an SSD's bandwidths must be positive, not {rates} bytes/s")
        if not (math.isfinite(self.cpu_s_per_byte) and self.cpu_s_per_byte > 0):
            raise ValueError(f"moving a byte takes some of a core's time, not {self.cpu_s_per_byte} s")

    def to_json(self) -> dict[str, Any]:
        """Converts to a dict for `json.dumps` and `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Calibration":
        """Reads a dict of `to_json`. Raises ValueError for anything else."""
        try:
            io = IoSettings(**(raw["io"] | {"backend": Backend(raw["io"]["backend"])}))
            return cls(**(raw | {"io": io}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a calibration of an SSD: {raw!r} ({error}); calibrate it again") from error


def calibrate(device: BlockDevice, offset: int, nbytes: int, *, seconds: float = 1.5) -> Calibration:
    """Finds the fastest settings for an SSD. Overwrites bytes [offset, offset + nbytes) of it.

    The region needs at least 16 MiB, in whole MiB; 64 MiB and more are better. The call first writes the region once,
    because the first write to preallocated space is slower than later ones. Then it takes about `seconds`. Such a short
    burst does not exhaust the caches in front of an SSD's flash, so the rates are upper bounds.

    Raises:
        OSError, ShortTransfer: the SSD failed.
    """
    if offset < 0 or offset % mmap.PAGESIZE or nbytes % GRANULE_NBYTES or nbytes < _in_flight_nbytes(DEFAULT_IO):
        raise ValueError(
            f"cannot calibrate on {nbytes} bytes at {offset}: the size must be a multiple of {GRANULE_NBYTES} of at "
            f"least {_in_flight_nbytes(DEFAULT_IO)}, and the place one of {mmap.PAGESIZE}"
        )
    bench = _Bench(device, offset, nbytes)
    bench.write_once()
    trials = _Trials(bench, seconds)
    choice = trials.search()
    return Calibration(
        io=choice,
        read_bytes_per_s=bench.bytes_per_s(choice, _READS, 2 * trials.trial_s),
        write_bytes_per_s=bench.bytes_per_s(choice, _WRITES, 2 * trials.trial_s),
        mixed_bytes_per_s=trials.rate(choice),
        cpu_s_per_byte=bench.cpu_s_per_byte(choice, _MIX, 2 * trials.trial_s),
        measured_at=datetime.now(UTC).date().isoformat(),
    )


def mixed_bytes_per_s(
    device: BlockDevice, offset: int, nbytes: int, io: IoSettings, begin: Callable[[], object], *, seconds: float
) -> float:
    """Measures an SSD's rate with these settings, reads and writes mixed as in `calibrate`.

    Overwrites bytes [offset, offset + nbytes). `begin` is called once the region has been written; the measurement
    starts when it returns.

    Raises:
        OSError, ShortTransfer: the SSD failed.
    """
    bench = _Bench(device, offset, nbytes)
    bench.write_once()
    begin()
    return bench.bytes_per_s(io, _MIX, seconds)


def stripe_weights(mixed_bytes_per_s: Sequence[float]) -> tuple[int, ...]:
    """Returns the number of chunks for each SSD in a round of striping: proportional to bandwidth, 1 to 8, reduced.

    A step ends when the slowest SSD has moved its share, so shares follow bandwidth. Small numbers keep a round short,
    so that a job of few chunks is balanced too. SSDs within 10 percent of the fastest of their group count as equal.
    The reason: two SSDs of the same model can differ that much in measurements.
    """
    if not all(math.isfinite(rate) and rate > 0 for rate in mixed_bytes_per_s):
        raise ValueError(f"an SSD's bandwidth must be positive, not {tuple(mixed_bytes_per_s)} bytes/s")
    groups: list[list[float]] = []  # fastest first
    for rate in sorted(mixed_bytes_per_s, reverse=True):
        if groups and rate >= _EQUAL_SHARE * groups[-1][0]:
            groups[-1].append(rate)
        else:
            groups.append([rate])
    means = [statistics.fmean(group) for group in groups]
    weight_of = {
        rate: max(1, round(_MAX_WEIGHT * mean / means[0]))
        for group, mean in zip(groups, means, strict=True)
        for rate in group
    }
    weights = [weight_of[rate] for rate in mixed_bytes_per_s]
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


# --- private ----------------------------------------------------------------------------------------------------------

_MIB = 1 << 20
# Sizes of a piece to try. Smaller ones are slower (1 MiB: 8 percent), because each piece costs locks and the GIL.
_PIECES_NBYTES = (2 * _MIB, 4 * _MIB, 8 * _MIB)
_THREADS = (2, 4, 8)  # numbers of threads to try for the THREADS backend
_RINGS = ((1, 4), (1, 8), (1, 16), (2, 8))  # threads and depth to try for the URING backend
_MAX_IN_FLIGHT_NBYTES = 64 * _MIB  # limit of bytes in flight: with more, urgent pieces only wait longer
_NUM_TRIALS = 35  # `search` and the three measurements after it take about as long as this many trials
_NUM_FINAL_ROUNDS = 3
_AS_GOOD = 0.97  # share of the fastest rate: above it the preferred settings win (see `_preference`)
_NEARLY_AS_GOOD = 0.93  # share of the fastest rate: one short trial cannot distinguish rates above it

_MAX_WEIGHT = 8
_EQUAL_SHARE = 0.9

# Patterns of successive transfers, True for a read. The optimizer reads 12 bytes per parameter (fp32 master and two
# moments) and writes 14 (also the bf16 param), which is 6 reads to 7 writes.
_READS = (True,)
_WRITES = (False,)
_MIX = tuple(i % 2 == 1 for i in range(13))


def _in_flight_nbytes(io: IoSettings) -> int:
    return io.num_threads * io.depth * io.piece_nbytes


def _preference(io: IoSettings) -> tuple[bool, int, int]:
    """Returns a sort key: of equally fast settings, the smallest key is preferred."""
    return io.backend is Backend.URING, _in_flight_nbytes(io), io.num_threads


class _Trials:
    """A greedy search by short trials: first the number in flight, then the size of a piece, for each backend."""

    def __init__(self, bench: "_Bench", seconds: float) -> None:
        self._bench = bench
        self._until_s = time.monotonic() + seconds
        self._rates: defaultdict[IoSettings, list[float]] = defaultdict(list)
        self.trial_s = seconds / _NUM_TRIALS

    def search(self) -> IoSettings:
        self._try(DEFAULT_IO)  # always, even if a slow SSD exceeds the time
        self._climb(Backend.THREADS, [(num_threads, 1) for num_threads in _THREADS])
        if uring_refusal() is None:
            self._climb(Backend.URING, _RINGS)
        finalists = self._finalists()
        for io in itertools.chain(*itertools.repeat(finalists, _NUM_FINAL_ROUNDS)):
            self._try_in_time(io)
        return self._near(finalists, _AS_GOOD)[0]

    def rate(self, io: IoSettings) -> float:
        return statistics.median(self._rates[io])

    def _finalists(self) -> list[IoSettings]:
        """Lists the preferred of the fast settings, and the two fastest of each backend, because rates are noisy."""
        finalists = self._near(self._rates, _NEARLY_AS_GOOD)[:1]
        for backend in Backend:
            tried = (io for io in self._rates if io.backend is backend)
            finalists += sorted(tried, key=self.rate, reverse=True)[:2]
        return list(dict.fromkeys(finalists))

    def _near(self, candidates: Collection[IoSettings], share: float) -> list[IoSettings]:
        """Lists the candidates that reach this share of the fastest one's rate, preferred ones first."""
        least = share * max(map(self.rate, candidates))
        return sorted((io for io in candidates if self.rate(io) >= least), key=_preference)

    def _climb(self, backend: Backend, shapes: Iterable[tuple[int, int]]) -> None:
        tried = [_settings(backend, shape, DEFAULT_IO.piece_nbytes) for shape in shapes]
        for io in tried:
            self._try_in_time(io)
        measured = [io for io in tried if io in self._rates]
        if measured:
            best = max(measured, key=self.rate)
            for piece_nbytes in _PIECES_NBYTES:
                self._try_in_time(_settings(backend, (best.num_threads, best.depth), piece_nbytes), again=False)

    def _try_in_time(self, io: IoSettings, *, again: bool = True) -> None:
        fits = _in_flight_nbytes(io) <= self._bench.max_in_flight_nbytes
        if fits and (again or io not in self._rates) and time.monotonic() < self._until_s:
            self._try(io)

    def _try(self, io: IoSettings) -> None:
        self._rates[io].append(self._bench.bytes_per_s(io, _MIX, self.trial_s))


def _settings(backend: Backend, shape: tuple[int, int], piece_nbytes: int) -> IoSettings:
    num_threads, depth = shape
    return IoSettings(backend=backend, num_threads=num_threads, depth=depth, piece_nbytes=piece_nbytes)


class _Bench:
    """A benchmark on a region of an SSD, with threads that move pieces like those of an SSD server."""

    def __init__(self, device: BlockDevice, offset: int, nbytes: int) -> None:
        self._device = device
        self._offset = offset
        self._nbytes = nbytes
        self.max_in_flight_nbytes = min(nbytes, _MAX_IN_FLIGHT_NBYTES)
        self._memory = mmap.mmap(-1, self.max_in_flight_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            # A virtual disk handles each run of physically contiguous memory separately. With small pages its rate was
            # 1.2 to 3.6 GB/s by chance, so two equal SSDs could differ threefold.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        noise = os.urandom(_MIB)  # random, because some SSDs compress data
        for start in range(0, self.max_in_flight_nbytes, _MIB):
            self._memory[start : start + _MIB] = noise

    def write_once(self) -> None:
        engine = open_engine(self._device, DEFAULT_IO)
        for start in range(0, self._nbytes, DEFAULT_IO.piece_nbytes):
            buffer = memoryview(self._memory)[: min(DEFAULT_IO.piece_nbytes, self._nbytes - start)]
            engine.submit(Transfer(is_read=False, offset=self._offset + start, buffer=buffer, tag=None))
            _collect(engine)

    def bytes_per_s(self, io: IoSettings, pattern: Sequence[bool], seconds: float) -> float:
        """Returns the bytes moved per second until the last transfer ends. After `seconds` no more transfers begin."""
        start_s = time.monotonic()
        moved = self._run(io, pattern, seconds)
        return moved / (time.monotonic() - start_s)

    def cpu_s_per_byte(self, io: IoSettings, pattern: Sequence[bool], seconds: float) -> float:
        """Returns the CPU seconds of all cores per byte moved. Other threads of this process should be idle."""
        start_s = time.process_time()
        moved = self._run(io, pattern, seconds)
        return (time.process_time() - start_s) / moved

    def _run(self, io: IoSettings, pattern: Sequence[bool], seconds: float) -> int:
        """Runs the transfers in threads and returns the bytes moved."""
        transfers = self._transfers(io, pattern)
        until_s = time.monotonic() + seconds
        moved: list[int] = []
        failures: list[BaseException] = []

        def work() -> None:
            try:
                moved.append(self._move(io, transfers, until_s))
            except BaseException as error:  # noqa: BLE001  raised again in the caller
                failures.append(error)

        threads = [threading.Thread(target=work, name=f"calibration-{i}") for i in range(io.num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return sum(moved)

    def _transfers(self, io: IoSettings, pattern: Sequence[bool]) -> Iterator[Transfer]:
        """Returns an endless iterator of transfers. `map` and the iterators in it are thread-safe.

        Transfers cover the whole region and memory with all settings, so that the comparison is fair.
        """
        places = list(range(self._offset, self._offset + self._nbytes - io.piece_nbytes + 1, io.piece_nbytes))
        random.Random(0).shuffle(places)
        starts = range(0, self.max_in_flight_nbytes - io.piece_nbytes + 1, io.piece_nbytes)
        memory = memoryview(self._memory)
        buffers = [memory[start : start + io.piece_nbytes] for start in starts]
        return map(
            Transfer,
            itertools.cycle(pattern),
            itertools.cycle(places),
            itertools.cycle(buffers),
            itertools.repeat(None),
        )

    def _move(self, io: IoSettings, transfers: Iterator[Transfer], until_s: float) -> int:
        """Works like a thread of an SSD server: keeps `depth` in flight, checksums each. Returns the bytes moved."""
        moved = 0
        engine = open_engine(self._device, io)
        try:
            for _ in range(io.depth):
                engine.submit(next(transfers))
            while engine.num_in_flight:
                for transfer in _collect(engine):
                    granule_digests(transfer.buffer)
                    moved += transfer.buffer.nbytes
                    if time.monotonic() < until_s:
                        engine.submit(next(transfers))
        finally:
            engine.close()
        return moved


def _collect(engine: TransferEngine) -> list[Transfer]:
    finished = engine.wait(None)
    for transfer in finished:
        if transfer.error is not None:
            raise transfer.error
    return finished
