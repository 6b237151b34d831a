"""Measures the rates at which this machine computes and moves data.

`python -m windlass.planner.profiling.measure_machine --precision bf16` prints them as one JSON object. No other work
should run on the machine meanwhile. The device is the first GPU with `--gpu`, else the CPU.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from windlass.engine.device import TORCH_DTYPE, GpuUnusableError, compute_device
from windlass.engine.optimizer import AdamSettings, ChunkStates, OptimizerKernel
from windlass.storage.ids import Kernel, Precision, StatePrecision

# Rows of a square matrix: as in a layer of a model with billions of parameters. On a CPU smaller, or it takes minutes.
_MATRIX_SIZE = {"cuda": 8192, "cpu": 2048}
_COPY_NBYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
_UPDATE_NUMEL = 64 << 20  # params of a timed optimizer update: 1 GiB of states, far more than caches hold
_NUM_REPEATS = 5  # timed runs, after a warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """The rates of a machine, all per second."""

    device: str  # its name
    num_devices: int  # GPUs; 0: the device is the CPU
    device_nbytes: int | None  # its memory; None: that of the host
    flops: float  # in large matrix products in the training precision
    fp32_flops: float | None  # the same in fp32, if the device is the CPU
    h2d_bytes: float  # on a CPU: by the one thread that copies in a job
    d2h_bytes: float
    duplex_bytes: float  # both directions at once, summed
    memory_bytes: float  # read and written by a copy on all cores
    adam_params: float  # updated in host memory by all optimizers of a job, with fp32 states and 16-bit gradients


def measure(
    precision: Precision,
    kernel_dir: Path | None,
    *,
    kernel: Kernel | None = None,
    optimizer_threads: int | None = None,
    uses_gpu: bool = False,
) -> MachineRates:
    """Measures all rates in about ten seconds.

    `kernel_dir`, `kernel`: see `OptimizerKernel`. `optimizer_threads`: threads of all optimizers of a job together;
    None: one for each core.

    Raises:
        GpuUnusableError: `uses_gpu` is set, and PyTorch cannot use the GPU.
    """
    all_threads = len(os.sched_getaffinity(0))
    device = compute_device(uses_gpu=uses_gpu)
    with _threads(all_threads if device.type == "cuda" else 1):
        h2d, d2h, duplex = _link_bytes(device)
    with _threads(optimizer_threads or all_threads):
        adam_params = _adam_params(kernel_dir, kernel)
    torch.set_num_threads(all_threads)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    flops = _flops(device, precision)
    return MachineRates(
        device=properties.name if properties else "CPU",
        num_devices=torch.cuda.device_count() if properties else 0,
        device_nbytes=properties.total_memory if properties else None,
        flops=flops,
        fp32_flops=None if properties else flops if precision is Precision.FP32 else _flops(device, Precision.FP32),
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        duplex_bytes=duplex,
        memory_bytes=_memory_bytes(),
        adam_params=adam_params,
    )


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flops(device: torch.device, precision: Precision) -> float:
    size = _MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=TORCH_DTYPE[precision]) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: torch.mm(left, right), device)


def _link_bytes(device: torch.device) -> tuple[float, float, float]:
    nbytes = _COPY_NBYTES[device.type]
    pinned = device.type == "cuda"
    hosts = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    devices = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def both() -> None:
        if not pinned:
            devices[0].copy_(hosts[0])
            hosts[1].copy_(devices[1])
            return
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    streams = [torch.cuda.Stream(device) for _ in range(2)] if pinned else []  # type: ignore[no-untyped-call]
    h2d = _seconds(lambda: devices[0].copy_(hosts[0], non_blocking=True), device)
    d2h = _seconds(lambda: hosts[1].copy_(devices[1], non_blocking=True), device)
    return nbytes / h2d, nbytes / d2h, 2 * nbytes / _seconds(both, device)


def _memory_bytes() -> float:
    nbytes = _COPY_NBYTES["cpu"]
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return 2 * nbytes / _seconds(lambda: target.copy_(source), torch.device("cpu"))


def _adam_params(kernel_dir: Path | None, kernel: Kernel | None) -> float:
    settings = AdamSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, decoupled=True)
    optimizer = OptimizerKernel(
        settings,
        grad_dtype=torch.bfloat16,
        param_dtype=torch.bfloat16,
        state_precision=StatePrecision.FP32,
        kernel=kernel,
        cache_dir=kernel_dir,
    )
    masters = {name: torch.full((_UPDATE_NUMEL,), 0.5) for name in ("master", "exp_avg", "exp_avg_sq")}
    low = {name: torch.full((_UPDATE_NUMEL,), 0.5, dtype=torch.bfloat16) for name in ("grad", "param")}
    states = ChunkStates(**masters, **low)

    def update() -> None:
        optimizer.update(states, learning_rate=1e-4, step=10, grad_scale=1.0, decay_numel=_UPDATE_NUMEL, seed=1)

    return _UPDATE_NUMEL / _seconds(update, torch.device("cpu"))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of some runs after a warm-up run."""
    taken = []
    for _ in range(1 + _NUM_REPEATS):
        start_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken[1:])


def main() -> None:
    """Measures with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m windlass.planner.profiling.measure_machine", description=__doc__)
    parser.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.BF16)
    parser.add_argument("--kernel-dir", type=Path)
    parser.add_argument("--optimizer-threads", type=int, help="of a job's optimizers together (default: all cores)")
    parser.add_argument("--gpu", action="store_true", help="the device is the first GPU (default: the CPU)")
    options = parser.parse_args()
    try:
        rates = measure(
            options.precision, options.kernel_dir, optimizer_threads=options.optimizer_threads, uses_gpu=options.gpu
        )
    except GpuUnusableError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(asdict(rates)))


if __name__ == "__main__":
    main()
