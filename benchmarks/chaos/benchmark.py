"""Checks that jobs succeed despite faults: `python -m benchmarks.chaos [--runs 40] [--seed 1] [--continue FILE]`

The service runs with real processes, as for a user. While a job runs, one to three injuries hit the installation, at
moments that the seed determines. An injury is one of these:

- SIGKILL of the service, the API, the dispatcher, the runner, a worker, an SSD server, the raylet, the GCS, or of all
- a database that does not answer, is locked, or restarts
- a full disk

Each job must succeed. It must report every step exactly once, with the same losses as an undisturbed job. It must
produce the same bytes, and leave no files or processes behind. If a run fails, its home is kept and the exit code is 1.

Forty runs take an hour or more. With `--continue` each result is stored in a file when its run ends. A later call with
that file repeats only the runs that failed or are missing. Its report includes all runs.

With `--boxes N` the service has that many boxes, which are sets of namespaces of this machine. Each run has as many
jobs, and three to five injuries, which may overlap:

- SIGKILL of a box's agent, dispatcher, raylet, worker or SSD server, or of all its processes, or of all of the head
- a box loses its power
- a link is cut, or slow, for 1 to 20 seconds

Each job must end as an undisturbed one, and have run on one box only.

With `--spread`, each run has one job over all boxes. Besides these injuries, it meets:

- SIGKILL of its runner, its optimizer, or the head's supervisor, then `windlass up`
- all processes of a box are stopped, or two boxes do not reach each other, for 3, 10 or 60 seconds
- a box's disk is full, a box is drained and resumed, or the user pauses and resumes the job

Its attempts must not overlap. The report says for each injury how many attempts began after it, and when the job made
progress again.

It needs the packages of the tests. Full disks need root, because they are a file system in a file. Runs on PostgreSQL
need its programs. If something is missing, those runs are left out, and the report says so.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.boxes.benchmark import run_on_boxes
from benchmarks.chaos.disk import own_disk, reason_not_to_fill_disks
from benchmarks.chaos.jobs import NotRightError, Observer, wait_for_moment
from benchmarks.chaos.plan import DatabaseKind, Run, plan_runs
from benchmarks.chaos.record import Complaint, Record, Wrong, complaints
from benchmarks.chaos.results import Done, Result, Results, report_results
from benchmarks.chaos.stage import NUM_STEPS, Stage, copy_kernels
from benchmarks.reporting.report import Report
from benchmarks.scratch_folder import scratch_folder
from tests.support.boxes.namespaces import NamespaceError
from tests.support.postgresql import PostgresServer, find_programs, postgres_server

_QUICK_RUNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """The result of a job without injuries, on one of the stages."""

    record: Record
    took_s: float


def run_undisturbed(stage: Stage) -> Undisturbed:
    """Submits a job and waits for its end. Raises NotRightError if it failed."""
    job_id = stage.submit()
    observer = Observer(stage.installation.url, job_id)
    observer.start()
    took_s = observer.wait()
    record = stage.record(job_id)
    problems = [*map(str, complaints(record, record)), *stage.wait_until_tidy(job_id), *observer.faults]
    if record.num_attempts != 1 or len(record.train_losses) != NUM_STEPS:
        problems.append(f"{len(record.train_losses)} of {NUM_STEPS} steps in {record.num_attempts} attempts")
    if problems:
        raise NotRightError(f"the undisturbed job: {'; '.join(problems)}")
    return Undisturbed(record=record, took_s=took_s)


def do_run(stage: Stage, run: Run, undisturbed: Undisturbed) -> Result:
    """Runs one job with the planned injuries."""
    job_id = stage.submit()
    observer = Observer(stage.installation.url, job_id)
    observer.start()
    done, problems, took_s, num_attempts = list[Done](), list[Complaint](), None, None
    try:
        for injury in run.injuries:
            wait_for_moment([observer], injury, undisturbed.took_s)
            at_s = time.monotonic() - observer.began_s
            if observer.took_s is None and stage.hurt(injury, job_id, undisturbed.took_s):
                done.append(Done(injury=injury, at_s=at_s))
        took_s = observer.wait()
        record = stage.record(job_id)
        num_attempts = record.num_attempts
        problems += complaints(record, undisturbed.record)
        problems += [_other(f"{left} is left") for left in stage.wait_until_tidy(job_id)]
    except NotRightError as error:
        problems.append(Complaint(wrong=error.wrong, text=str(error)))
    except Exception as error:  # noqa: BLE001  # the other runs continue
        traceback.print_exc()
        problems.append(_other(f"{type(error).__name__}: {error}"))
    return Result(
        run=run,
        done=tuple(done),
        took_s=took_s,
        lost_s=None if took_s is None else took_s - undisturbed.took_s,
        num_attempts=num_attempts,
        load=os.getloadavg()[0],
        complaints=(*problems, *map(_other, observer.faults)),
    )


def _other(text: str) -> Complaint:
    return Complaint(wrong=Wrong.OTHER, text=text)


class Stages:
    """The installations, one for each kind of database, both running at once. A failed one is replaced."""

    def __init__(self, scratch: Path, server: PostgresServer | None, *, fills_disks: bool) -> None:
        self._scratch = scratch
        self._server = server
        self._fills_disks = fills_disks
        self._open: dict[DatabaseKind, tuple[Stage, contextlib.ExitStack]] = {}
        self._kernels: Path | None = None  # a home with compiled kernels
        self._number = 0

    def of(self, database: DatabaseKind) -> Stage:
        """Returns the installation with that kind of database. Creates and starts it if there is none."""
        if database not in self._open:
            resources = contextlib.ExitStack()
            stage = resources.enter_context(self._made(database))
            self._open[database] = (stage, resources)
            home = stage.installation.home
            if self._kernels is not None:
                copy_kernels(self._kernels, home)
            self._kernels = home
            stage.up()
        return self._open[database][0]

    def keep(self, database: DatabaseKind, number: int) -> Path:
        """Copies the home of an installation whose run failed, and ends it. Returns the copy's path."""
        stage, resources = self._open.pop(database)
        kept = Path(tempfile.mkdtemp(prefix=f"windlass-chaos-run-{number}-", dir=self._scratch.parent))
        stage.stop_all()
        shutil.copytree(stage.installation.home, kept / "home", symlinks=True, ignore_dangling_symlinks=True)
        self._kernels = kept / "home"
        resources.close()
        return kept

    def end(self) -> list[str]:
        """Ends all installations with `windlass down`. Returns what was left over, or was ended by mistake."""
        problems = []
        for database in list(self._open):
            stage, resources = self._open.pop(database)
            others = {each: each.installation.service_processes() for each, _ in self._open.values()}
            problems += stage.end()
            for other, before in others.items():
                if not before or before[0] not in other.installation.service_processes():
                    problems.append("`windlass down` ended another installation's service")
            resources.close()
        return problems

    def close(self) -> None:
        """Releases all resources, in any state."""
        for _, resources in self._open.values():
            resources.close()

    @contextlib.contextmanager
    def _made(self, database: DatabaseKind) -> Iterator[Stage]:
        self._number += 1
        folder = self._scratch / f"{database}-{self._number}"
        folder.mkdir(mode=0o700)
        with contextlib.ExitStack() as resources:
            url = server = None
            if database is DatabaseKind.POSTGRESQL:
                assert self._server is not None
                server, url = self._server, resources.enter_context(self._server.new_database(migrated=False))
            if self._fills_disks:
                folder = resources.enter_context(own_disk(folder / "disk"))
            stage = Stage(folder, server=server, url=url, has_own_disk=self._fills_disks)
            resources.callback(stage.close)
            yield stage


def run_all(options: argparse.Namespace, scratch: Path) -> int:
    """Runs everything, prints the report, and returns the exit code."""
    databases = list(DatabaseKind)
    left_out = ["the machine's clock and its power: tests set clocks, and cut off writes to the SSDs"]
    programs = find_programs()
    if programs is None:
        databases.remove(DatabaseKind.POSTGRESQL)
        left_out.append("PostgreSQL, which is not installed")
    if (reason := reason_not_to_fill_disks(scratch)) is not None:
        left_out.append(f"full disks ({reason})")
    configuration = {
        "form": "quick" if options.quick else "full",
        "runs": options.runs,
        "seed": options.seed,
        "databases": ", ".join(databases),
        "job": f"{NUM_STEPS} steps of a model of 100 thousand parameters; evaluations and checkpoints every 20 steps",
        "not covered": "; ".join(left_out),
    }
    report = Report("Jobs under injuries", scratch, configuration)
    results = Results(options.file)
    report.add(*map(str, results.said))
    runs = plan_runs(options.runs, options.seed, databases, num_steps=NUM_STEPS, disk_can_be_filled=reason is None)
    mine = [run for run in runs if options.database in (None, run.database)]
    todo = [run for run in mine if run.number not in results.right]
    problems = []
    if todo:
        with contextlib.ExitStack() as resources:
            needed = sorted({run.database for run in todo})
            server = None
            if programs is not None and DatabaseKind.POSTGRESQL in needed:
                server = resources.enter_context(postgres_server(programs))
            stages = Stages(scratch, server, fills_disks=reason is None)
            resources.callback(stages.close)
            run_undisturbed(stages.of(needed[0]))  # this also compiles the kernels that all jobs use
            undisturbed = {database: run_undisturbed(stages.of(database)) for database in needed}
            first = undisturbed[needed[0]]
            for database, each in undisturbed.items():
                if differences := complaints(each.record, first.record):
                    raise NotRightError(f"the undisturbed job on {database}: {'; '.join(map(str, differences))}")
            facts = {"seed": options.seed, "full disks": reason is None, "undisturbed job": first.record.digest}
            results.begin(facts, {database: each.took_s for database, each in undisturbed.items()})
            report.add(results.said[-1])
            for run in todo:
                result = do_run(stages.of(run.database), run, undisturbed[run.database])
                results.add(result)
                report.add(results.said[-1])
                if not result.is_right:
                    report.add(f"Its home is kept in {stages.keep(run.database, run.number)}.")
            problems = stages.end()
    report.add(*problems)
    report_results(report, results.all)
    return 0 if not problems and {run.number for run in mine} <= results.right else 1


def main() -> int:
    """Returns 0 if every job succeeded and nothing was left over."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, help="jobs to hurt (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="what is hurt, and when (default: 1)")
    parser.add_argument("--boxes", type=int, default=1, help="boxes of the service (default: 1)")
    parser.add_argument("--spread", action="store_true", help="each job takes all boxes")
    parser.add_argument("--database", choices=list(DatabaseKind), help="only the runs on this kind (default: all)")
    parser.add_argument("--continue", type=Path, dest="file", help="what keeps the results, and may have some already")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_RUNS} runs")
    parser.add_argument("--directory", type=Path, default=Path(), help="where homes are made (default: here)")
    options = parser.parse_args()
    options.runs = options.runs or (_QUICK_RUNS if options.quick else 40)
    # On a signal, exit normally, so that no process and no mount is left over.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: sys.exit(1))
    if options.boxes < 1:
        parser.error(f"--boxes must be at least 1, got {options.boxes}")
    if options.spread and options.boxes == 1:
        parser.error("--spread: a job over several boxes needs --boxes 2 or more")
    if options.boxes > 1 and options.database not in (None, DatabaseKind.SQLITE):
        parser.error("--database: several boxes keep their jobs in SQLite")
    with scratch_folder(options.directory) as scratch:
        if options.boxes == 1:
            return run_all(options, scratch)
        try:
            return run_on_boxes(options, scratch)
        except NamespaceError as error:
            print(f"this machine allows no boxes of namespaces: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
