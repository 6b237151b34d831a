"""Measures the rates that predictions need: copies from a registered arena, latencies of the host, and the machine.

Copies go through the engine's own streams, in pieces as large as a job's chunks.
"""

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_check.case import Setting
from benchmarks.gpu_check.cases import LinkCase
from benchmarks.gpu_check.head import measure_head
from benchmarks.gpu_check.kernels import prepared_kernel
from benchmarks.peers.contenders import SHM_DIR
from benchmarks.reporting.machine import num_cores
from tests.support.training import has_direct_io, keep_calibration
from windlass.actors.job import calibrated
from windlass.amounts import GB, GIB
from windlass.engine.device import Device, TensorArena, copy, memory_node
from windlass.planner.profiling.measure_machine import MachineRates
from windlass.planner.profiling.measure_machine import measure as measure_rates
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import Attempt, JobId, Kernel, Precision, StatePrecision
from windlass.storage.memory import Arena, arena_path, arena_room_nbytes, directory_free_nbytes

_ARENA_NBYTES = 4 * GIB
_TINY_ARENA_NBYTES = 64 << 20
_PIECE_NBYTES = 32 << 20  # of one copy: a chunk of bf16 params
_MAX_ON_DEVICE = 32  # pieces, each way
_NUM_LAUNCHES = 1000
_NUM_WAITS = 50
_NUM_REPEATS = 3  # timed runs, after a warm-up
_US = 1e-6
_DEADLINE_S = 60.0


def measure(_case: LinkCase, setting: Setting) -> dict[str, Any]:
    """Returns the link's rates, the host's latencies, the machine's profile, and times of the head."""
    is_gpu, kernels = setting.device == "cuda", setting.root / "kernels"
    gpu_nbytes = torch.cuda.mem_get_info()[0] if is_gpu else directory_free_nbytes(SHM_DIR)
    kernel = Kernel.FUSED if setting.is_tiny else prepared_kernel(kernels, StatePrecision.FP32, sums_grads=False)
    rates = measure_rates(Precision.BF16, kernels, kernel=kernel, uses_gpu=is_gpu)
    link = _link(setting)
    return {
        **link,
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


def _link(setting: Setting) -> dict[str, Any]:
    nbytes = _TINY_ARENA_NBYTES if setting.is_tiny else min(_ARENA_NBYTES, arena_room_nbytes(SHM_DIR) // 4)
    nbytes = max(2, nbytes // _PIECE_NBYTES // 2 * 2) * _PIECE_NBYTES
    token = CancelToken(_DEADLINE_S)
    device = Device(torch.device(setting.device), token=token)
    start_s = time.perf_counter()
    arena = Arena.create(arena_path(SHM_DIR, JobId("gpu-check"), Attempt(1)), nbytes, node=memory_node(device.device))
    try:
        created_s = time.perf_counter() - start_s
        memory = TensorArena.of(arena).memory
        memory.zero_()
        start_s = time.perf_counter()
        device.pin(memory)
        pinned_s = time.perf_counter() - start_s
        rates = _copies(device, memory)
        latencies = _latencies(device)
        device.unpin(memory)
        return {
            **rates,
            "create_s_per_gib": created_s / (nbytes / GIB),
            "register_s_per_gib": pinned_s / (nbytes / GIB),
            **latencies,
        }
    finally:
        token.cancel()
        arena.close()
        arena.unlink()


def _copies(device: Device, memory: torch.Tensor) -> dict[str, float]:
    """Returns the rates of both ways alone, and of both at once, summed."""
    host = torch.split(memory, _PIECE_NBYTES)
    half = min(len(host) // 2, _MAX_ON_DEVICE)
    on_device = [device.empty(_PIECE_NBYTES) for _ in range(2 * half)]
    inward = list(zip(on_device[:half], host[:half], strict=True))
    outward = list(zip(host[half : 2 * half], on_device[half:], strict=True))
    device.h2d.wait(device.compute.record())

    def move(*ways: str) -> None:
        for index in range(half):
            if "h2d" in ways:
                device.h2d.run(lambda pair=inward[index]: copy(*pair))  # type: ignore[misc]
            if "d2h" in ways:
                device.d2h.run(lambda pair=outward[index]: copy(*pair))  # type: ignore[misc]
        for stream in (device.h2d, device.d2h):
            stream.record().wait()

    nbytes = half * _PIECE_NBYTES
    return {
        "h2d_gb_per_s": nbytes / GB / _median_s(lambda: move("h2d"), _NUM_REPEATS),
        "d2h_gb_per_s": nbytes / GB / _median_s(lambda: move("d2h"), _NUM_REPEATS),
        "duplex_gb_per_s": 2 * nbytes / GB / _median_s(lambda: move("h2d", "d2h"), _NUM_REPEATS),
    }


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
