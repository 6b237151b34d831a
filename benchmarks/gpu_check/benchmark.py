"""Checks windlass's results on this GPU against plain PyTorch, and measures its speed: `make gpu-check`

There are two parts. Parity trains a small model with every precision and every choice for activations. Speed is full
fine-tuning with random weights, with one limit on GPU memory and one on host memory. It is compared with the same
model's compute-only peak and with DeepSpeed.

All actors are threads of this process. It needs torch and transformers, but neither Ray nor the web service. It ends
within `--limit-s`. The report is stored after each case, so that little is lost if the process is killed. Without a GPU
it prints a note and exits with 0. `--device cpu --tiny` runs all parts on small models, as a test of the check itself.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.gpu_check import parity as gpu_parity
from benchmarks.gpu_check import peers as gpu_peers
from benchmarks.gpu_check import speed as gpu_speed
from benchmarks.gpu_check.cases import CAPS, SpeedCase, cases, tiny_cases
from benchmarks.peers.contenders import SHM_DIR
from benchmarks.reporting.report import GIB, Report, rounded
from windlass.storage.memory import directory_free_nbytes, memory_available_nbytes

REPORTS = Path(__file__).parents[1] / "reports"
PARTS = ("parity", "speed")
_TINY_STEPS = 2
# Seconds after the limit in which running work may end, before the process is killed.
_GRACE_S = 20.0
# Share of the limit for parity, if both parts run.
_PARITY_SHARE = 0.4


@dataclass(slots=True)
class Check:
    """The measurements so far, and their report."""

    report: Report
    path: Path | None  # None: do not store the report
    parts: Sequence[str]
    speed_cases: Sequence[SpeedCase]
    parity: list[gpu_parity.ParityRun] = field(default_factory=list)
    speeds: list[gpu_speed.SpeedRun] = field(default_factory=list)
    peers: list[gpu_peers.PeerRun] = field(default_factory=list)

    @property
    def sections(self) -> list[str]:
        """The report's sections as lines of Markdown."""
        lines = []
        if "parity" in self.parts:
            lines += ["", "## Parity", "", *gpu_parity.tables(self.parity)]
        if "speed" in self.parts:
            lines += ["", "## Speed", "", *_explanations(), "", *gpu_speed.tables(self.speeds)]
            lines += ["", *gpu_peers.tables(self.peers)] if self.peers else []
        return [*lines, ""]

    @property
    def keys(self) -> dict[str, Any]:
        """The object of the last line, with null for missing measurements."""
        return {
            **gpu_parity.keys(self.parity),
            **gpu_speed.keys(self.speeds, self.speed_cases),
            **gpu_peers.keys(self.peers, self.speeds, self.speed_cases),
        }

    @property
    def has_failed(self) -> bool:
        """True if losses differ, or a case failed."""
        return any(run.is_wrong for run in self.parity) or any(run.is_failure for run in self.speeds)

    def note(self, what: str) -> None:
        """Prints the result of a case, and stores the report so far."""
        print(what, flush=True)
        self._keep([*self.report.lines, *self.sections, json.dumps(rounded(self.keys))])

    def finish(self) -> None:
        """Prints the whole report and stores it."""
        self.report.add(*self.sections, *([] if self.path is None else [f"Kept as {self.path.name}.", ""]))
        self.report.finish(self.keys)
        self._keep(self.report.lines)

    def _keep(self, lines: Sequence[str]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text("\n".join(lines) + "\n")


def _explanations() -> list[str]:
    host_caps = " and ".join(
        f"{nbytes / GIB:g} GiB with states on {states}" for states, nbytes in CAPS.host_nbytes.items()
    )
    return textwrap.wrap(
        "bf16 with fp32 states, or split ones that are equal, AdamW, no clipping. The GPU cap, "
        f"{CAPS.gpu_nbytes / GIB:g} GiB, is on torch's caching allocator (`set_per_process_memory_fraction`), and the "
        "GPU peak is of what it gave out; CUDA's own context comes on top. The host cap is on the arena: "
        f"{host_caps}. The host peak is resident memory, the arena once. States on host: the job has no SSDs and keeps "
        "no checkpoints, so a crash loses it. The compute-only peak is that of two distinct layers, the embedding and "
        "the head, params and gradients on the GPU, uncapped, through the same block runner; a layer's time counts as "
        "often as the model has layers. It is measured with every layer computed again, and with nothing computed "
        "again. Where the time went is from the actors' timeline: each resource's busy time, and the causes for which "
        "the GPU computed nothing.",
        width=110,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a loss differs or a case failed, else 0."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check skipped: this machine has no CUDA device that torch can use")
        return 0
    # TF32 would round fp32 products, so the comparison would not be exact.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.device == "cpu":
        torch.set_num_threads(1)  # as in a job
    transformers_logging.disable_progress_bar()
    started_s = time.monotonic()
    parts = PARTS if options.part == "all" else (options.part,)
    with tempfile.TemporaryDirectory(prefix=".gpu-check-", dir=options.directory) as folder:
        root = Path(folder).absolute()
        check = _check(options, parts, root)
        with _ended_after(options.limit_s + _GRACE_S, check, root):
            until_s = started_s + options.limit_s
            if "parity" in parts:
                share = _PARITY_SHARE if "speed" in parts else 1.0
                _run_parity(check, root, options, started_s + share * options.limit_s)
            if "speed" in parts:
                _run_speed(check, root, options, until_s)
        check.finish()
    return int(check.has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--limit-s", type=float, default=560.0, help="seconds for all of it (default: 560)")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the speed part, cases whose name has this")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the SSD to use (default: here)")
    parser.add_argument("--reports", type=Path, help="where the report is kept (default: benchmarks/reports)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps; no report, no peers")
    return parser


def _check(options: argparse.Namespace, parts: Sequence[str], root: Path) -> Check:
    """Creates the check, with a report that describes the machine and the limits."""
    is_gpu = options.device == "cuda"
    configuration = {
        "form": f"{'tiny' if options.tiny else 'full'}, {', '.join(parts)}, at most {options.limit_s:g} s",
        "device": torch.cuda.get_device_name(0) if is_gpu else "the processor",
        "device memory": f"{torch.cuda.get_device_properties(0).total_memory / GIB:.1f} GiB" if is_gpu else "",
        "CUDA": torch.version.cuda,
        "free": f"{memory_available_nbytes() / GIB:.1f} GiB of memory, "
        f"{directory_free_nbytes(Path('/dev/shm')) / GIB:.1f} of shared memory, "
        f"{directory_free_nbytes(root) / GIB:.1f} on the disk",
    }
    report = Report("GPU check", root, configuration)
    kept = options.reports or (None if options.tiny else REPORTS)
    names = [report.lines[2][:10], "gpu_check", *(() if options.part == "all" else parts), *options.only.split()]
    path = None if kept is None else kept / f"{'-'.join(names)}.md"
    chosen = [case for case in (tiny_cases if options.tiny else cases)() if options.only in case.name]
    return Check(report, path, parts, chosen)


@contextlib.contextmanager
def _ended_after(limit_s: float, check: Check, root: Path) -> Iterator[None]:
    """Ends the process after the limit, even if it hangs. Reports all results so far, and removes temporary files."""

    def give_up() -> None:
        check.report.add("", f"Ended by force after {limit_s:g} s: what was under way hung, or took far too long.")
        check.finish()
        for arena in SHM_DIR.glob(f"windlass-*-{os.getpid()}.arena"):
            arena.unlink(missing_ok=True)
        shutil.rmtree(root, ignore_errors=True)
        os._exit(1)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _run_parity(check: Check, root: Path, options: argparse.Namespace, until_s: float) -> None:
    runs = gpu_parity.measure(
        gpu_parity.cases(compiles=not options.tiny),
        root,
        device=options.device,
        num_steps=_TINY_STEPS if options.tiny else gpu_parity.NUM_STEPS,
        until_s=until_s,
    )
    for run in runs:
        check.parity.append(run)
        result = run.reason if run.difference is None else f"difference {run.difference:.1e}"
        check.note(f"parity: {', '.join(run.case.columns)}: {result}")


def _run_speed(check: Check, root: Path, options: argparse.Namespace, until_s: float) -> None:
    with_peers = not options.tiny and not options.only
    runs = gpu_speed.measure(
        check.speed_cases,
        root,
        device=options.device,
        caps=CAPS,
        compiles=not options.tiny,
        until_s=until_s - gpu_peers.wanted_s() if with_peers else until_s,
    )
    for run in runs:
        check.speeds.append(run)
        result = run.reason if run.tokens_per_s is None else f"{run.tokens_per_s:.0f} tokens/s"
        check.note(f"speed: {run.case.name}: {result}")
    for peer in gpu_peers.measure(root, gpu_nbytes=CAPS.gpu_nbytes, until_s=until_s) if with_peers else ():
        check.peers.append(peer)
        check.note(f"speed: {peer.peer.title}: {peer.run.missing or f'{peer.tokens_per_s:.0f} tokens/s'}")


if __name__ == "__main__":
    sys.exit(main())
