"""Checks windlass on this GPU: its results against plain PyTorch's, and its speed against what the GPU can do.

`make gpu-check` runs up to 21 cases in a fixed order, each in a process of its own. Ten minutes tell most, because the
first four cases answer most. Each case adds one line to a results file, from which the report is made, so a killed run
loses only its current case. `--resume` goes on. docs/gpu.md says how to read the output.

It needs torch, transformers and small packages, but neither Ray nor the web service. Without a GPU it prints a note
and exits with 0. `--device cpu --tiny` runs all parts on small models, as a test of the check itself.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.case import Case, Result, ResultsFile, Setting, Status, named, run_case
from benchmarks.gpu_check.cases import cases
from benchmarks.gpu_check.report import has_failed, in_words, keys, report_lines
from benchmarks.reporting.report import rounded
from benchmarks.scratch_folder import scratch_folder
from windlass.actors.lifecycle import allocator_settings

REPORTS = Path(__file__).parents[1] / "reports"
_LIMIT_S = 580.0  # timeout of a case
_GRACE_S = 15.0  # after it, the process of the case is killed
_WATCH_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result differs or a case failed, else 0."""
    options = _parser().parse_args(arguments)
    listed = cases(is_tiny=options.tiny)
    chosen = named(listed, options.only)
    if not chosen:
        print(f"no case has {options.only!r} in its name; there are {', '.join(case.name for case in listed)}")
        return 2
    if options.list:
        for number, case in enumerate(chosen, start=1):
            print(f"{number:2} {case.name:36} about {case.expected_s:.0f} s")
        return 0
    if options.device == "cuda" and not _has_gpu():
        print("gpu-check skipped: this machine has no CUDA device that torch can use")
        return 0
    with scratch_folder(options.directory) as root:
        results = _results_file(options, root)
        setting = Setting(
            root=root,
            results=results,
            device=options.device,
            is_tiny=options.tiny,
            plan=json.loads(options.plan.read_text()) if options.plan else {},
        )
        done = [name for name, each in results.read().items() if each.status is Status.DONE] if options.resume else []
        for number, case in enumerate(chosen, start=1):
            head = f"case {number} of {len(chosen)}: {case.name}"
            if case.name in done:
                print(f"{head} is done", flush=True)
                continue
            print(f"{head} begins, about {case.expected_s:.0f} s", flush=True)
            result = _run_apart(case, setting, options.limit_s)
            print(f"{head} ends after {result.took_s:.0f} s: {in_words(result)}", flush=True)
            _keep_report(results, listed, options, root)
        found = results.read()
        print("\n".join(["", *_report(results, listed, options, root)]))
        print(json.dumps(rounded(keys(found, listed))), flush=True)
        return int(has_failed({case.name: found[case.name] for case in chosen if case.name in found}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="the case of this name, or all that have it in theirs"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the newest results file, without what is done"
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="predictions made elsewhere, see docs/gpu.md")
    parser.add_argument("--limit-s", type=float, default=_LIMIT_S, help=f"seconds for a case (default: {_LIMIT_S:g})")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the SSD to use (default: here)")
    parser.add_argument("--reports", type=Path, help="where results and report are kept (default: benchmarks/reports)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps; nothing is kept")
    return parser


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _results_file(options: argparse.Namespace, root: Path) -> ResultsFile:
    """Returns today's file, or the newest one with `--resume`. A run of all cases begins with an empty file."""
    folder = options.reports or (root if options.tiny else REPORTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now(UTC):%Y-%m-%d}-gpu_check.jsonl"
    if options.resume:
        earlier = (each for each in folder.glob("*-gpu_check.jsonl") if each != path)
        return ResultsFile(path if path.exists() else max(earlier, default=path))
    if not options.only:
        path.unlink(missing_ok=True)
    return ResultsFile(path)


def _run_apart(case: Case, setting: Setting, limit_s: float) -> Result:
    """Runs a case in a process of its own, because a failed kernel makes CUDA unusable for the rest of a process."""
    os.environ.update(allocator_settings(os.environ))  # as in a job; PyTorch reads them when it is loaded
    before = len(setting.results.path.read_text().splitlines()) if setting.results.path.exists() else 0
    start_s = time.monotonic()
    process = multiprocessing.get_context("spawn").Process(target=run_here, args=(case, setting, limit_s))
    process.start()
    process.join(limit_s + _GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()
    lines = setting.results.path.read_text().splitlines() if setting.results.path.exists() else []
    if len(lines) == before:
        reason = f"its process ended with exit code {process.exitcode}"
        took_s = time.monotonic() - start_s
        setting.results.add(Result(case=case.name, part=case.part, status=Status.FAILED, reason=reason, took_s=took_s))
    remove_arenas(process.pid)
    shutil.rmtree(setting.root / case.name, ignore_errors=True)  # its states may be most of the disk
    return setting.results.read()[case.name]


def run_here(case: Case, setting: Setting, limit_s: float) -> None:
    """Runs a case in this process, which ends after the limit, or when its parent has ended."""
    import torch
    from transformers.utils import logging as transformers_logging

    faulthandler.enable()  # shows where a driver or a library ended the process
    threading.Thread(target=_end_in_time, args=(case, setting, limit_s), daemon=True).start()
    # TF32 would round fp32 products, so the comparison would not be exact.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if setting.device == "cpu":
        torch.set_num_threads(1)  # as in a job
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of names that newer transformers have
    run_case(case, setting)


def _end_in_time(case: Case, setting: Setting, limit_s: float) -> None:
    """Ends this process, even if it hangs. What it has in shared memory goes with it."""
    parent, start_s = os.getppid(), time.monotonic()
    while os.getppid() == parent and time.monotonic() - start_s < limit_s:
        time.sleep(_WATCH_S)
    reason = f"it was ended after {limit_s:g} s, because it hung or took too long"
    if os.getppid() == parent:
        setting.results.add(Result(case=case.name, part=case.part, status=Status.FAILED, reason=reason, took_s=limit_s))
    remove_arenas(os.getpid())
    os._exit(1)


def remove_arenas(pid: int | None) -> None:
    """Removes the arenas of a process that has ended by force."""
    for arena in Path("/dev/shm").glob(f"windlass-*-{pid}.arena"):
        arena.unlink(missing_ok=True)


def _report(results: ResultsFile, listed: Sequence[Case], options: argparse.Namespace, root: Path) -> list[str]:
    form = f"{'tiny form, ' if options.tiny else ''}{results.path.name}"
    return report_lines(results.read(), listed, root, form)


def _keep_report(results: ResultsFile, listed: Sequence[Case], options: argparse.Namespace, root: Path) -> None:
    """Stores the report so far beside the results."""
    last: dict[str, Any] = rounded(keys(results.read(), listed))
    lines = [*_report(results, listed, options, root), json.dumps(last)]
    results.path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
