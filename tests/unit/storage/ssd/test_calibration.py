import errno
import itertools
import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from windlass.storage.integrity.checksum import GRANULE_NBYTES
from windlass.storage.io.engines import DEFAULT_IO, Backend, IoSettings, uring_refusal
from windlass.storage.ssd import calibration
from windlass.storage.ssd.calibration import Calibration, calibrate, stripe_weights

MIB = 1 << 20
NBYTES = 16 * MIB
CALIBRATION = Calibration(
    io=DEFAULT_IO,
    read_bytes_per_s=3.5e9,
    write_bytes_per_s=2e9,
    mixed_bytes_per_s=2.5e9,
    cpu_s_per_byte=7e-11,
    measured_at="2026-01-31",
)


@dataclass
class Device:
    """A descriptor that records its calls, and fails from the `fails_at`th write on."""

    data_fd: int
    fails_at: int | None = None
    calls: list[tuple[bool, int, int]] = field(default_factory=list)

    def read(self, offset: int, buffer: memoryview) -> int:
        self.calls.append((True, offset, buffer.nbytes))
        return os.preadv(self.data_fd, [buffer], offset)

    def write(self, offset: int, buffer: memoryview) -> int:
        self.calls.append((False, offset, buffer.nbytes))
        if self.fails_at is not None and len(self.calls) >= self.fails_at:
            raise OSError(errno.EIO, "the test's fault")
        return os.pwritev(self.data_fd, [buffer], offset)


def without_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "uring_refusal", lambda: "the test says so")


@pytest.fixture
def data_fd(tmp_path: Path, direct: bool) -> Any:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
    os.posix_fallocate(fd, 0, NBYTES + 2 * MIB)
    yield fd
    os.close(fd)


# --- measuring -----------------------------------------------------------------------------------------------------


def test_a_real_file_is_measured_and_only_the_region_changes(
    data_fd: int, aligned: Callable[[bytes], memoryview]
) -> None:
    guard = random.Random(0).randbytes(MIB)
    for place in (0, MIB + NBYTES):
        os.pwritev(data_fd, [aligned(guard)], place)
    found = calibrate(Device(data_fd), MIB, NBYTES, seconds=0.2)
    assert min(found.read_bytes_per_s, found.write_bytes_per_s, found.mixed_bytes_per_s) > 0
    assert found.cpu_s_per_byte > 1e-12  # no core computes checksums of 1 TB in a second
    assert found.io.num_threads * found.io.depth * found.io.piece_nbytes <= NBYTES
    for place in (0, MIB + NBYTES):
        buffer = aligned(bytes(MIB))
        os.preadv(data_fd, [buffer], place)
        assert buffer == guard


def test_all_is_written_before_anything_is_measured(data_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_uring(monkeypatch)
    device = Device(data_fd)
    calibrate(device, MIB, NBYTES + MIB, seconds=0.05)
    first_read = next(i for i, (is_read, _, _) in enumerate(device.calls) if is_read)
    written = {mib for _, offset, nbytes in device.calls[:first_read] for mib in range(offset, offset + nbytes, MIB)}
    assert written == set(range(MIB, NBYTES + 2 * MIB, MIB))
    assert all(offset >= MIB and offset + nbytes <= NBYTES + 2 * MIB for _, offset, nbytes in device.calls)


@pytest.mark.parametrize("fails_at", [1, 10])  # at the first write; in a measuring thread
def test_a_failing_ssd_is_an_error(data_fd: int, fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_uring(monkeypatch)
    with pytest.raises(OSError, match="the test's fault"):
        calibrate(Device(data_fd, fails_at=fails_at), 0, NBYTES, seconds=0.05)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("calibration-")]


@pytest.mark.parametrize(("offset", "nbytes"), [(-4096, NBYTES), (100, NBYTES), (0, NBYTES + 4096), (0, 8 * MIB)])
def test_unusable_region_is_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="cannot calibrate on"):
        calibrate(Device(-1), offset, nbytes)


# --- choosing ---------------------------------------------------------------------------------------------------------


class Ssd:
    """Replaces the measurement: the test defines the speed of each setting."""

    def __init__(self, speed: Callable[[IoSettings], float]) -> None:
        self.speed = speed
        self.max_in_flight_nbytes = 64 * MIB
        self.measured: list[tuple[IoSettings, Sequence[bool]]] = []
        self.written = False

    def write_once(self) -> None:
        self.written = True

    def bytes_per_s(self, io: IoSettings, pattern: Sequence[bool], seconds: float) -> float:
        assert self.written
        assert seconds > 0
        self.measured.append((io, pattern))
        return self.speed(io)

    def cpu_s_per_byte(self, io: IoSettings, pattern: Sequence[bool], seconds: float) -> float:
        self.measured.append((io, pattern))
        return 7e-11


def in_flight_nbytes(io: IoSettings) -> int:
    return io.num_threads * io.depth * io.piece_nbytes


def choose(
    monkeypatch: pytest.MonkeyPatch, speed: Callable[[IoSettings], float], *, seconds: float = 60.0, uring: bool = True
) -> tuple[Calibration, Ssd]:
    ssd = Ssd(speed)
    monkeypatch.setattr(calibration, "_Bench", lambda device, offset, nbytes: ssd)
    monkeypatch.setattr(calibration, "uring_refusal", lambda: None if uring else "the test says so")
    return calibrate(Device(-1), 0, NBYTES, seconds=seconds), ssd


def is_like(io: IoSettings, backend: Backend, num_in_flight: int, piece_nbytes: int) -> bool:
    return (io.backend, io.num_threads * io.depth, io.piece_nbytes) == (backend, num_in_flight, piece_nbytes)


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize(
    ("num_in_flight", "piece_nbytes"),
    [(n, mib * MIB) for n in (4, 8) for mib in (2, 4, 8)],  # no more may be in flight
)
def test_the_fastest_is_found(
    backend: Backend, num_in_flight: int, piece_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed falls on both sides of an optimum, as on an SSD."""

    def speed(io: IoSettings) -> float:
        distance = abs((io.num_threads * io.depth).bit_length() - num_in_flight.bit_length())
        distance += abs(io.piece_nbytes.bit_length() - piece_nbytes.bit_length())
        return 4e9 * 0.8**distance * (1.0 if io.backend is backend else 0.9)

    found, _ = choose(monkeypatch, speed)
    assert is_like(found.io, backend, num_in_flight, piece_nbytes)
    assert found.mixed_bytes_per_s == 4e9


def test_among_equals_threads_with_the_least_in_flight_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ssd = choose(monkeypatch, lambda io: 4e9)
    assert found.io.backend is Backend.THREADS
    assert in_flight_nbytes(found.io) == min(
        in_flight_nbytes(io) for io, _ in ssd.measured if io.backend is Backend.THREADS
    )


@pytest.mark.parametrize(("gain", "expected"), [(1.02, Backend.THREADS), (1.05, Backend.URING)])
def test_io_uring_must_be_more_than_a_little_faster(
    gain: float, expected: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speed(io: IoSettings) -> float:
        if io.backend is Backend.URING:
            return 4e9 * gain
        return 4e9 if io.num_threads == 8 else 3e9  # so that threads may have more in flight, too

    found, _ = choose(monkeypatch, speed)
    assert found.io.backend is expected


def test_io_uring_is_not_tried_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ssd = choose(monkeypatch, lambda io: 9e9 if io.backend is Backend.URING else 4e9, uring=False)
    assert {io.backend for io, _ in ssd.measured} == {Backend.THREADS}


def test_one_lucky_trial_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[IoSettings] = set()

    def speed(io: IoSettings) -> float:
        first = io not in seen
        seen.add(io)
        return 6e9 if first and io.backend is Backend.URING and io.num_threads * io.depth == 16 else 4e9

    found, _ = choose(monkeypatch, speed)
    assert found.io.backend is Backend.THREADS
    assert found.mixed_bytes_per_s == 4e9


def test_without_time_the_default_is_measured_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ssd = choose(monkeypatch, lambda io: 1e8, seconds=1e-9)
    assert found.io == DEFAULT_IO
    assert [io for io, _ in ssd.measured] == [DEFAULT_IO] * 4  # the mix, reading, writing, the mix's CPU time
    assert found.mixed_bytes_per_s == 1e8


def test_the_mix_is_the_optimizers_and_ends_are_measured_with_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ssd = choose(monkeypatch, lambda io: 1e9 * io.num_threads)
    *searching, (read_io, reads), (write_io, writes), (cpu_io, mix) = ssd.measured
    assert read_io == write_io == cpu_io == found.io
    assert len(set(mix)) == 2
    assert (set(reads), set(writes)) == ({True}, {False})
    for _, pattern in searching:
        assert sum(pattern) / len(pattern) == 12 / (12 + 14)
        assert all(a != b for a, b in itertools.pairwise(pattern))  # interleaved


def test_no_setting_keeps_more_in_flight_than_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ssd = choose(monkeypatch, lambda io: float(in_flight_nbytes(io)))
    assert max(in_flight_nbytes(io) for io, _ in ssd.measured) == 64 * MIB


def test_concurrent_transfers_use_disjoint_ranges(data_fd: int) -> None:
    """In memory and on the SSD, for any settings; and the whole region is used."""
    bench = calibration._Bench(Device(data_fd), MIB, NBYTES)
    for piece_nbytes, pattern in ((MIB, (True,)), (4 * MIB, (False,)), (2 * MIB, (True, False))):
        io = replace(DEFAULT_IO, piece_nbytes=piece_nbytes)
        stream = bench._transfers(io, pattern)
        round_ = [next(stream) for _ in range(NBYTES // piece_nbytes)]
        assert sorted(each.offset for each in round_) == list(range(MIB, MIB + NBYTES, piece_nbytes))
        assert [each.is_read for each in round_[: len(pattern)]] == list(pattern)
        for i, each in enumerate(round_):
            assert each.buffer.nbytes == piece_nbytes
            each.buffer[:1] = bytes([i])
        assert [each.buffer[0] for each in round_] == list(range(len(round_)))


def test_io_uring_is_measured_too(data_fd: int) -> None:
    if refusal := uring_refusal():
        pytest.skip(f"no io_uring here: {refusal}")
    device = Device(data_fd)
    bench = calibration._Bench(device, 0, NBYTES)
    bench.write_once()
    device.calls.clear()
    io = IoSettings(backend=Backend.URING, num_threads=2, depth=4, piece_nbytes=GRANULE_NBYTES)
    assert bench.bytes_per_s(io, (True, False), 0.02) > 0
    assert device.calls == []  # it bypassed the device's own calls


# --- storing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "io", [DEFAULT_IO, IoSettings(backend=Backend.URING, num_threads=2, depth=8, piece_nbytes=MIB)]
)
def test_a_calibration_survives_json(io: IoSettings) -> None:
    kept = replace(CALIBRATION, io=io)
    text = json.dumps(kept.to_json())
    assert Calibration.from_json(json.loads(text)) == kept
    assert len(text) < 1024  # it shares a page with other data


@pytest.mark.parametrize(
    "changes",
    [
        {"io": None},
        {"io": {"backend": "libaio", "num_threads": 1, "depth": 1, "piece_nbytes": MIB}},
        {"io": {"backend": "threads", "num_threads": 0, "depth": 1, "piece_nbytes": MIB}},
        {"io": {"backend": "threads", "num_threads": 1}},
        {"read_bytes_per_s": -1.0},
        {"write_bytes_per_s": float("nan")},
        {"mixed_bytes_per_s": 0.0},
        {"measured_by": "a later version"},
    ],
)
def test_invalid_calibration_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not a calibration of an SSD.*calibrate it again"):
        Calibration.from_json(CALIBRATION.to_json() | changes)


def test_calibration_without_a_field_is_refused() -> None:
    raw = CALIBRATION.to_json()
    for name in raw:
        with pytest.raises(ValueError, match="calibrate it again"):
            Calibration.from_json({key: value for key, value in raw.items() if key != name})


# --- striping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([], ()),
        ([3e9], (1,)),
        ([3e9, 3e9, 3e9], (1, 1, 1)),
        ([7.0e9, 6.4e9], (1, 1)),
        ([6.4e9, 7.0e9, 6.9e9], (1, 1, 1)),
        ([7.0e9, 3.5e9], (2, 1)),
        ([3.5e9, 7.0e9], (1, 2)),
        ([7.0e9, 6.0e9], (8, 7)),
        ([7.0e9, 6.8e9, 3.6e9, 3.4e9], (2, 2, 1, 1)),
        ([7.0e9, 6.4e9, 5.9e9], (8, 8, 7)),  # each within 10 percent of the next, but not of the first
        ([7.0e9, 0.5e9], (8, 1)),
        ([7.0e9, 0.01e9], (8, 1)),  # at least one
    ],
)
def test_weights_follow_bandwidth(rates: list[float], expected: tuple[int, ...]) -> None:
    assert stripe_weights(rates) == expected


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bandwidth_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        stripe_weights([3e9, rate])
