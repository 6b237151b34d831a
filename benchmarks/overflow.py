"""Measures the check for infinities and NaNs in a gradient: `python -m benchmarks.overflow [--quick]`

`squared_norm` and `isinf().any() or isnan().any()` run in alternating order on one gradient, with the same threads.
Their additional memory is measured in a fresh process, by the kernel's high-water mark. The mark is reset when the
gradient exists and every function has run once on a small one.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, ratio, spread
from windlass.engine.optimizer import squared_norm

MIB = 1 << 20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SMALL_NUMEL = 1 << 16  # elements of the gradient that warms up


def isinf_isnan(grad: torch.Tensor) -> bool:
    """Checks a gradient in the usual way.

    It reads every element twice, and allocates results of the gradient's size.
    """
    return bool(grad.isinf().any() or grad.isnan().any())


def is_not_finite(grad: torch.Tensor) -> bool:
    """Checks a gradient by its squared norm."""
    return not bool(squared_norm(grad).isfinite())


CHECKS: dict[str, Callable[[torch.Tensor], bool]] = {
    "windlass, squared norm": is_not_finite,
    "isinf or isnan": isinf_isnan,
}
_OURS, _NAIVE = CHECKS


def gradient(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a gradient of finite values, so that no check can end early."""
    return torch.empty(numel, dtype=dtype).uniform_(-1, 1)


def measure(numel: int, dtype: torch.dtype, num_rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every call, by check."""
    grad = gradient(numel, dtype)
    times: dict[str, list[float]] = defaultdict(list)
    for index in range(num_rounds + 1):  # the first round warms up
        for name in CHECKS if index % 2 == 0 else reversed(CHECKS):
            start_s = time.perf_counter()
            is_overflow = CHECKS[name](grad)
            elapsed_s = time.perf_counter() - start_s
            if is_overflow:
                raise RuntimeError(f"{name} found something in a gradient that is all finite")
            if index:
                times[name].append(elapsed_s)
    return times


def extra_peak_nbytes(name: str, numel: int, dtype: str) -> int:
    """Returns a check's peak memory beside its gradient, measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.overflow", "--peak", name, str(numel), dtype]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_extra_peak(name: str, numel: int, dtype: torch.dtype) -> None:
    """Measures the peak in the fresh process and prints it.

    Source: proc(5), clear_refs: 5 resets the high-water mark to the current value.
    """
    torch.set_num_threads(num_cores())
    check = CHECKS[name]
    check(gradient(_SMALL_NUMEL, dtype))
    grad = gradient(numel, dtype)
    Path("/proc/self/clear_refs").write_text("5")
    before_nbytes = _status_nbytes("VmRSS")
    check(grad)
    print(max(0, _status_nbytes("VmHWM") - before_nbytes))


def _status_nbytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overflow", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fp32 only, a quarter of the size, fewer rounds")
    parser.add_argument("--peak", nargs=3, metavar=("CHECK", "NUMEL", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        name, numel, dtype = options.peak
        print_extra_peak(name, int(numel), _DTYPES[dtype])
        return
    numel = (32 if options.quick else 128) * MIB
    num_rounds = 3 if options.quick else 9
    torch.set_num_threads(num_cores())
    configuration = {
        "form": "quick" if options.quick else "full",
        "gradient": f"{numel / MIB:.0f} Mi elements",
        "rounds": num_rounds,
        "threads": num_cores(),
    }
    report = Report("Overflow check", Path(), configuration)
    rows, speedups, peaks = [], [], []
    for label, dtype in _DTYPES.items() if not options.quick else [("fp32", torch.float32)]:
        times = measure(numel, dtype, num_rounds)
        medians = {name: statistics.median(values) for name, values in times.items()}
        speedups.append(medians[_NAIVE] / medians[_OURS])
        for name, values in times.items():
            peak_nbytes = extra_peak_nbytes(name, numel, label)
            if name == _OURS:
                peaks.append(peak_nbytes)
            rows.append((label, name, spread(values, scale=1e-3, digits=1), f"{peak_nbytes / MIB:.1f}"))
    report.add_table(("gradient", "check", "ms", "extra peak, MiB"), rows)
    report.add("Spreads are median (smallest to largest) over all rounds. The ratio is that of fp32.")
    report.finish({"over_isinf_isnan": ratio(speedups[0], 1.0), "extra_peak_nbytes": max(peaks)})


if __name__ == "__main__":
    main()
