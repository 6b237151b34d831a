"""Measures the rates that predictions need: copies from a registered arena, latencies of the host, and the machine.

Copies go through the engine's own streams, in pieces as large as a job's chunks. The first GPU gives the profile. Where
there are several, the copies of each are timed alone and beside those of all others, which shows what they share.
"""

import contextlib
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.case import Setting, in_short
from benchmarks.gpu_check.cases import LinkCase
from benchmarks.gpu_check.compute_alone.head import measure_head
from benchmarks.peers.contenders import SHM_DIR
from benchmarks.reporting.machine import num_cores
from tests.support.training import has_direct_io, keep_calibration
from windlass.actors.job import calibrated
from windlass.amounts import GB, GIB
from windlass.engine.device import Device, TensorArena, copy, memory_node
from windlass.engine.linear_parts import Columns
from windlass.planner.profiling.measure_machine import MachineRates
from windlass.planner.profiling.measure_machine import measure as measure_rates
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import Attempt, JobId, Kernel, Precision
from windlass.storage.memory import Arena, arena_path, arena_room_nbytes, directory_free_nbytes

_ARENA_NBYTES = 4 * GIB
_TINY_ARENA_NBYTES = 64 << 20
_PIECE_NBYTES = 32 << 20  # of one copy: a chunk of bf16 params
_MAX_ON_DEVICE = 32  # pieces, each way
# A matrix of which columns are copied to the device: bytes of its rows, their largest number, and bytes of a row that
# are copied. So many columns of bf16 params have parts of 2**20 to 2**27 elements, with 16384 rows.
_ROW_NBYTES, _MAX_ROWS = 32 << 10, 16384
_COLUMNS_NBYTES = (128, 512, 2048, 8192, 16384)
_ARENA_OF_MANY_NBYTES = 2 * _MAX_ON_DEVICE * _PIECE_NBYTES  # of each device, where there are several
_WAYS = {"h2d": ("h2d",), "d2h": ("d2h",), "duplex": ("h2d", "d2h")}
_NUM_LAUNCHES = 1000
_NUM_WAITS = 50
_NUM_REPEATS = 3  # timed runs, after a warm-up
_US = 1e-6
_DEADLINE_S = 60.0


def measure(_case: LinkCase, setting: Setting) -> dict[str, Any]:
    """Returns the link's rates, the host's latencies, the machine's profile, and times of the head."""
    is_gpu, kernels = setting.device == "cuda", setting.root / "kernels"
    gpu_nbytes = torch.cuda.mem_get_info()[0] if is_gpu else directory_free_nbytes(SHM_DIR)
    kernel = Kernel.FUSED if setting.is_tiny else None
    rates = measure_rates(Precision.BF16, kernels, kernel=kernel, uses_gpu=is_gpu)
    link = _link(setting)
    return {
        **link,
        "by_device": _by_device(setting, devices_here(setting.device)),
        "torch_pinned_h2d_gb_per_s": rates.h2d_bytes / GB,
        "torch_pinned_d2h_gb_per_s": rates.d2h_bytes / GB,
        "hardware": _hardware(setting, rates, link),
        "num_cores": num_cores(),
        "room": {
            "gpu_nbytes": gpu_nbytes,
            "arena_nbytes": arena_room_nbytes(SHM_DIR),
            "disk_nbytes": directory_free_nbytes(setting.root),
        },
        "head": measure_head(setting),
    }


def _hardware(setting: Setting, rates: MachineRates, link: dict[str, Any]) -> dict[str, Any]:
    """Returns the machine's profile, as docs/hardware.md has it."""
    folder = setting.root / "link-ssd"
    if setting.is_tiny:
        keep_calibration(folder)
    with calibrated(folder, {}, direct=has_direct_io(setting.root)) as (_, ssd):
        pass
    shutil.rmtree(folder)
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "gpus": {
            "count": rates.num_devices,
            "memory_gib": (rates.device_nbytes or memory_nbytes) / GIB,
            "tflops": rates.flops / 1e12,
            "name": rates.device,
        },
        "host": {
            "memory_gib": memory_nbytes / GIB,
            "memory_gb_per_s": rates.memory_bytes / GB,
            "adam_params_per_s": rates.adam_params,
        },
        "pcie": {key: link[key] for key in ("h2d_gb_per_s", "d2h_gb_per_s", "duplex_gb_per_s")},
        "ssds": {
            "count": 1,
            "read_gb_per_s": ssd.read_bytes_per_s / GB,
            "write_gb_per_s": ssd.write_bytes_per_s / GB,
            "capacity_gib": directory_free_nbytes(setting.root) / GIB,
            "cpu_s_per_gb": ssd.cpu_s_per_byte * GB,
        },
    }


def devices_here(kind: str) -> list[torch.device]:
    """Returns all GPUs that torch finds, or the CPU as one device."""
    return [torch.device(kind, i) for i in range(torch.cuda.device_count())] if kind == "cuda" else [torch.device(kind)]


def _link(setting: Setting) -> dict[str, float]:
    """Returns the rates and latencies of the first device."""
    with _opened(torch.device(setting.device), _arena_nbytes(setting, _ARENA_NBYTES)) as link:
        (rates,), _ = _rates([link])
        return {
            **rates,
            "create_s_per_gib": link.create_s_per_gib,
            "register_s_per_gib": link.register_s_per_gib,
            **link.column_rates(),
            **_latencies(link.device),
        }


def _by_device(setting: Setting, devices: Sequence[torch.device]) -> dict[str, Any] | None:
    """Returns the rates by device, or why there are none; None if there is one device."""
    if len(devices) == 1:
        return None
    try:
        return links_by_device(setting, devices)
    except Exception as error:  # noqa: BLE001 - predictions need the first device's rates, whatever the others do
        return {"reason": in_short(error)}


def links_by_device(setting: Setting, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Returns the rates of each device alone and with all at once, and the rates of all together.

    Each device has an arena of its own, near it, as each job has.
    """
    nbytes = _arena_nbytes(setting, _ARENA_OF_MANY_NBYTES, num_arenas=len(devices))
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(_opened(device, nbytes, index)) for index, device in enumerate(devices)]
        alone = [_rates([link])[0][0] for link in links]
        at_once, together = _rates(links)
    each = [
        {"device": str(device), "alone": alone_rates, "at_once": rates}
        for device, alone_rates, rates in zip(devices, alone, at_once, strict=True)
    ]
    return {"devices": each, "together": together}


def _arena_nbytes(setting: Setting, most_nbytes: int, num_arenas: int = 1) -> int:
    """Returns the bytes of an arena: pieces for both ways, and less than `most_nbytes` where there is little room."""
    room_nbytes = arena_room_nbytes(SHM_DIR) // 4 // num_arenas
    nbytes = _TINY_ARENA_NBYTES if setting.is_tiny else min(most_nbytes, room_nbytes)
    return max(2, nbytes // _PIECE_NBYTES // 2 * 2) * _PIECE_NBYTES


class _Link:
    """A device and a registered arena, with the copies between them."""

    def __init__(
        self, device: Device, memory: torch.Tensor, *, create_s_per_gib: float, register_s_per_gib: float
    ) -> None:
        self.device, self.create_s_per_gib, self.register_s_per_gib = device, create_s_per_gib, register_s_per_gib
        self._memory = memory
        host = torch.split(memory, _PIECE_NBYTES)
        self._num_pieces = half = min(len(host) // 2, _MAX_ON_DEVICE)
        on_device = [device.empty(_PIECE_NBYTES) for _ in range(2 * half)]
        self._copies = {
            "h2d": (device.h2d, list(zip(on_device[:half], host[:half], strict=True))),
            "d2h": (device.d2h, list(zip(host[half : 2 * half], on_device[half:], strict=True))),
        }
        self.way_nbytes = half * _PIECE_NBYTES
        device.h2d.wait(device.compute.record())

    def moved_s(self, ways: Sequence[str]) -> float:
        """Copies all pieces of the ways, at once, and returns the seconds that it took."""
        start_s = time.perf_counter()
        queued = [self._copies[way] for way in ways]
        for index in range(self._num_pieces):
            for stream, pairs in queued:
                stream.run(partial(copy, *pairs[index]))
        for stream, _ in queued:
            stream.record().wait()
        return time.perf_counter() - start_s

    def column_rates(self) -> dict[str, float]:
        """Returns GB/s of copies of columns to the device, by the bytes of a row that are copied."""
        num_rows = min(_MAX_ROWS, self._memory.nbytes // _ROW_NBYTES)
        rates = {}
        for nbytes in _COLUMNS_NBYTES:
            columns = Columns(offset=0, num_rows=num_rows, width=_ROW_NBYTES, start=nbytes, stop=2 * nbytes)
            target = self.device.empty(columns.numel)
            self.device.h2d.wait(self.device.compute.record())
            load = partial(columns.load, target, self._memory, 0)
            taken_s = _median_s(
                partial(self.device.h2d.run, load), _NUM_REPEATS, after=lambda: self.device.h2d.record().wait()
            )
            rates[f"columns_of_{nbytes}_bytes_gb_per_s"] = columns.numel / GB / taken_s
        return rates


@contextlib.contextmanager
def _opened(device: torch.device, nbytes: int, index: int = 0) -> Iterator[_Link]:
    """Opens a device with an arena of its own. `index` tells the arenas of this process apart."""
    token = CancelToken(_DEADLINE_S)
    opened = Device(device, token=token)
    path = arena_path(SHM_DIR, JobId(f"gpu-check-{index}"), Attempt(1))
    start_s = time.perf_counter()
    arena = Arena.create(path, nbytes, node=memory_node(device))
    try:
        create_s = time.perf_counter() - start_s
        memory = TensorArena.of(arena).memory
        memory.zero_()
        start_s = time.perf_counter()
        opened.pin(memory)
        register_s = time.perf_counter() - start_s
        gib = nbytes / GIB
        yield _Link(opened, memory, create_s_per_gib=create_s / gib, register_s_per_gib=register_s / gib)
        opened.unpin(memory)
    finally:
        token.cancel()
        arena.close()
        arena.unlink()


def _rates(links: Sequence[_Link]) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Returns the rates of each link, and of all together, while all copy at once: each way, and both ways summed."""
    each: list[dict[str, float]] = [{} for _ in links]
    together: dict[str, float] = {}
    with ThreadPoolExecutor(len(links)) as pool:
        for name, ways in _WAYS.items():
            # The first run is not timed.
            runs = [list(pool.map(lambda link, ways=ways: link.moved_s(ways), links)) for _ in range(1 + _NUM_REPEATS)]
            nbytes = [len(ways) * link.way_nbytes for link in links]
            for rates, moved_nbytes, taken in zip(each, nbytes, zip(*runs[1:], strict=True), strict=True):
                rates[f"{name}_gb_per_s"] = moved_nbytes / GB / statistics.median(taken)
            together[f"{name}_gb_per_s"] = sum(nbytes) / GB / statistics.median(map(max, runs[1:]))
    return each, together


def _latencies(device: Device) -> dict[str, float]:
    """Returns microseconds of the host: a launch, an event's wait, a wait between streams, and a callback."""
    small = torch.zeros(16, device=device.device)

    def launch() -> None:
        small.add_(1)

    def launch_many() -> None:
        for _ in range(_NUM_LAUNCHES):
            launch()

    def wait() -> None:
        device.compute.run(launch)
        device.compute.record().wait()

    def hop() -> None:
        for _ in range(_NUM_WAITS):
            device.h2d.wait(device.compute.record())
            device.compute.wait(device.h2d.record())
        device.synchronize()

    def call_back() -> None:
        is_called = threading.Event()
        device.compute.run(launch)
        device.compute.then(is_called.set)
        is_called.wait(_DEADLINE_S)

    launch_s = _median_s(lambda: device.compute.run(launch_many), _NUM_REPEATS, after=device.synchronize)
    return {
        "launch_us": launch_s / _NUM_LAUNCHES / _US,
        "event_wait_us": _median_s(wait, _NUM_WAITS) / _US,
        "stream_wait_us": _median_s(hop, _NUM_REPEATS) / (2 * _NUM_WAITS) / _US,
        "callback_us": _median_s(call_back, _NUM_WAITS) / _US,
    }


def _median_s(run: Callable[[], object], number: int, after: Callable[[], object] = lambda: None) -> float:
    """Returns the median seconds of some runs, after one that is not timed. `after` is not timed either."""
    taken = []
    for _ in range(1 + number):
        start_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start_s)
        after()
    return statistics.median(taken[1:])
