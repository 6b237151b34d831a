"""The runs of `benchmarks.chaos --boxes N`."""

import argparse
import os
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks.chaos.boxes.stage import BoxStage, names_of, num_steps_of
from benchmarks.chaos.disk import reason_not_to_fill_disks
from benchmarks.chaos.jobs import JOB_DEADLINE_S, NotRightError, Observer, wait_for_moment
from benchmarks.chaos.plan import DatabaseKind, Run, plan_runs_of_boxes
from benchmarks.chaos.record import Complaint, Record, Wrong, complaints
from benchmarks.chaos.results import Done, Result, Results, report_results
from benchmarks.reporting.report import Report

_WATCH_INTERVAL_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """The results of jobs without injuries."""

    record: Record  # of each of them
    took_s: float  # all of them


class Watch(Protocol):
    """A thread that looks at the boxes while jobs run."""

    def start(self) -> None:
        """Starts the thread."""

    def complaints(self) -> list[Complaint]:
        """Ends the thread. Returns a complaint for each job with which something was wrong."""


class AttemptWatch(threading.Thread):
    """Notes which attempts of jobs over all boxes have living processes at the same time."""

    def __init__(self, stage: BoxStage, job_ids: Sequence[str]) -> None:
        super().__init__(name="attempts", daemon=True)
        self._stage, self._job_ids = stage, job_ids
        self._wrong: dict[str, str] = {}  # by job
        self._boxes: dict[str, set[str]] = defaultdict(set)  # by job, those on which processes lived
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_WATCH_INTERVAL_S):
            for job_id in self._job_ids:
                living = self._stage.living_attempts(job_id)
                self._boxes[job_id] |= living.keys()
                if len({attempt for attempts in living.values() for attempt in attempts}) > 1:
                    self._wrong.setdefault(job_id, f"attempts lived at the same time: {living}")

    def complaints(self) -> list[Complaint]:
        """Ends the watch. Returns a complaint for each job whose attempts overlapped, or did not use all boxes."""
        self._ended.set()
        self.join()
        for job_id in self._job_ids:
            if missing := set(self._stage.names) - self._boxes[job_id]:
                self._wrong.setdefault(job_id, f"no attempt ran on {', '.join(sorted(missing))}")
        return [
            Complaint(wrong=Wrong.DOUBLED, text=f"job {number}: {self._wrong[job_id]}", job=number)
            for number, job_id in enumerate(self._job_ids, start=1)
            if job_id in self._wrong
        ]


class ArenaWatch(threading.Thread):
    """Notes the boxes on which a job has run, by its shared memory."""

    def __init__(self, stage: BoxStage, job_ids: Sequence[str]) -> None:
        super().__init__(name="arenas", daemon=True)
        self.boxes: dict[str, set[str]] = defaultdict(set)  # by job
        self._stage, self._job_ids = stage, job_ids
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_WATCH_INTERVAL_S):
            try:
                found = self._stage.arenas()
            except OSError:  # the box has just ended
                continue
            for name, arenas in found.items():
                for job_id in self._job_ids:
                    if any(job_id in arena for arena in arenas):
                        self.boxes[job_id].add(name)

    def complaints(self) -> list[Complaint]:
        """Ends the watch. Returns a complaint for each job that has run on several boxes."""
        self._ended.set()
        self.join()
        return [
            Complaint(wrong=Wrong.DOUBLED, text=f"job {number} ran on {', '.join(sorted(boxes))}", job=number)
            for number, job_id in enumerate(self._job_ids, start=1)
            if len(boxes := self.boxes[job_id]) > 1
        ]


class Runs:
    """Makes runs on a stage. It has one thread for each injury of a run, which last as long as it does."""

    def __init__(self, stage: BoxStage, num_jobs: int) -> None:
        self._stage = stage
        self._num_jobs = num_jobs
        self._executor = ThreadPoolExecutor(16, thread_name_prefix="injury")

    def close(self) -> None:
        """Ends the threads, also those whose injuries still last after an error or a signal."""
        self._stage.give_up()
        self._executor.shutdown()

    def run_undisturbed(self) -> Undisturbed:
        """Submits jobs and waits for their ends. Raises NotRightError if one failed, or if they differ."""
        job_ids, watch, observers = self._begin()
        took_s = max(each.wait() for each in observers)
        records = [self._stage.record(job_id) for job_id in job_ids]
        problems = [str(each) for record in records for each in complaints(record, records[0])]
        problems += [*map(str, watch.complaints()), *self._stage.wait_until_tidy(job_ids)]
        problems += [fault for each in observers for fault in each.faults]
        problems += [f"{each.num_attempts} attempts" for each in records if each.num_attempts != 1]
        problems += [
            f"{len(each.train_losses)} of {self._stage.num_steps} steps"
            for each in records
            if len(each.train_losses) != self._stage.num_steps
        ]
        if problems:
            raise NotRightError(f"the undisturbed jobs: {'; '.join(problems)}")
        return Undisturbed(record=records[0], took_s=took_s)

    def do_run(self, run: Run, undisturbed: Undisturbed) -> Result:
        """Runs jobs with the planned injuries."""
        job_ids, watch, observers = self._begin()
        began_s = time.monotonic()
        begun = list[tuple[Done, Future[float | None]]]()
        for injury in run.injuries:
            wait_for_moment(observers, injury, undisturbed.took_s)
            if any(each.is_alive() for each in observers):
                start = Done(injury=injury, at_s=time.monotonic() - began_s)
                begun.append((start, self._executor.submit(self._stage.hurt, injury, job_ids, undisturbed.took_s)))
        problems, done = list[Complaint](), list[Done]()
        took_s, num_attempts = None, 0
        until_s = time.monotonic() + JOB_DEADLINE_S
        times = [_end_of(number, each, until_s, problems) for number, each in enumerate(observers, start=1)]
        for each, future in begun:
            try:
                if (came_s := future.result()) is not None:
                    done.append(replace(each, at_s=came_s - began_s))
            except Exception as error:  # noqa: BLE001  # the other runs continue
                problems.append(_complaint_about(error, f"{each}: "))
        if self._num_jobs == 1:
            done = followed_by(done, observers[0], began_s)
        if None not in times:
            took_s = max(each for each in times if each is not None)
        for number, job_id in enumerate(job_ids, start=1):
            try:
                record = self._stage.record(job_id)
            except Exception as error:  # noqa: BLE001
                problems.append(_complaint_about(error, f"job {number} has no record: ", Wrong.LOST, number))
                continue
            num_attempts += record.num_attempts
            problems += complaints(record, undisturbed.record, job=number)
        problems += watch.complaints()
        problems += [
            Complaint(wrong=Wrong.OTHER, text=f"{left} is left") for left in self._stage.wait_until_tidy(job_ids)
        ]
        return Result(
            run=run,
            done=tuple(done),
            took_s=took_s,
            lost_s=None if took_s is None else took_s - undisturbed.took_s,
            num_attempts=num_attempts,
            load=os.getloadavg()[0],
            complaints=tuple(problems),
            num_jobs=self._num_jobs,
        )

    def _begin(self) -> tuple[list[str], Watch, list[Observer]]:
        job_ids = self._stage.submit(self._num_jobs)
        watch = AttemptWatch(self._stage, job_ids) if self._stage.is_spread else ArenaWatch(self._stage, job_ids)
        observers = [Observer(self._stage.url, job_id, interval_s=_WATCH_INTERVAL_S) for job_id in job_ids]
        for thread in (watch, *observers):
            thread.start()
        return job_ids, watch, observers


def followed_by(done: Sequence[Done], observer: Observer, began_s: float) -> list[Done]:
    """Adds what followed each injury of one job, in the order of the injuries.

    `began_s`: by the monotonic clock, when the run began.
    """
    ordered = sorted(done, key=lambda each: each.at_s)
    ends_s = [*(each.at_s for each in ordered[1:]), float("inf")]
    moments = [replace(each, at_s=each.at_s - began_s) for each in observer.moments]
    followed = []
    for injury, end_s in zip(ordered, ends_s, strict=True):
        before = [each for each in moments if each.at_s <= injury.at_s]
        step, attempt = (
            max((each.step for each in before), default=0),
            max((each.attempt for each in before), default=0),
        )
        later = [each for each in moments if each.at_s > injury.at_s]
        # The first new step may have been on its way when the injury came.
        progress = next((each.at_s for each in later if each.step > step + 1), None)
        if progress is None and observer.took_s is not None:
            progress = observer.began_s - began_s + observer.took_s
        followed.append(
            replace(
                injury,
                step=step,
                num_attempts=max((each.attempt for each in later if each.at_s <= end_s), default=attempt) - attempt,
                progress_s=None if progress is None else progress - injury.at_s,
            )
        )
    return followed


def _end_of(number: int, observer: Observer, until_s: float, problems: list[Complaint]) -> float | None:
    """Waits for the end of a job. Returns the seconds that it took, or None with a complaint."""
    took_s = None
    try:
        took_s = observer.wait(max(1.0, until_s - time.monotonic()))
    except NotRightError as error:
        problems.append(Complaint(wrong=error.wrong, text=f"job {number}: {error}", job=number))
    for fault in observer.faults:
        wrong = Wrong.LOST if "answered 404" in fault else Wrong.OTHER
        problems.append(Complaint(wrong=wrong, text=f"job {number}: {fault}", job=number))
    return took_s


def _complaint_about(error: Exception, where: str, wrong: Wrong = Wrong.OTHER, job: int = 1) -> Complaint:
    if isinstance(error, NotRightError):
        return Complaint(wrong=error.wrong, text=f"{where}{error}", job=job)
    traceback.print_exception(error)
    return Complaint(wrong=wrong, text=f"{where}{type(error).__name__}: {str(error)[:500]}", job=job)


class _Stages:
    """The boxes of all runs. Those of a run that failed are replaced."""

    def __init__(self, scratch: Path, num_boxes: int, *, is_spread: bool, fills_disks: bool) -> None:
        self._scratch = scratch
        self._num_boxes = num_boxes
        self._is_spread = is_spread
        self._fills_disks = fills_disks
        self._number = 0
        self._resources = ExitStack()
        self._open: tuple[BoxStage, Runs] | None = None

    @property
    def runs(self) -> Runs:
        """Starts boxes if there are none."""
        if self._open is None:
            self._number += 1
            folder = self._scratch / f"boxes-{self._number}"
            folder.mkdir(mode=0o755)
            stage = BoxStage(folder, self._num_boxes, is_spread=self._is_spread, fills_disks=self._fills_disks)
            self._resources.callback(stage.close)
            runs = Runs(stage, 1 if self._is_spread else self._num_boxes)
            self._resources.callback(runs.close)
            stage.start()
            self._open = stage, runs
        return self._open[1]

    def keep(self, number: int) -> Path:
        """Copies the homes of boxes whose run failed, and ends them. Returns the folder of the copies."""
        assert self._open is not None
        kept = Path(tempfile.mkdtemp(prefix=f"windlass-chaos-run-{number}-", dir=self._scratch.parent))
        self._open[0].keep(kept)
        self.close()
        return kept

    def end(self) -> list[str]:
        """Ends the boxes with `windlass down`. Returns what was left over."""
        problems = [] if self._open is None else self._open[0].end()
        self.close()
        return problems

    def close(self) -> None:
        """Ends everything, in any state."""
        self._open = None
        self._resources.close()


def run_on_boxes(options: argparse.Namespace, scratch: Path) -> int:
    """Runs everything, prints the report, and returns the exit code."""
    names, is_spread = names_of(options.boxes), options.spread
    num_steps = num_steps_of(is_spread=is_spread)
    reason = reason_not_to_fill_disks(scratch) if is_spread else None
    fills_disks = is_spread and reason is None
    which = "one, over all boxes" if is_spread else f"{options.boxes}, on any boxes"
    configuration = {
        "form": "quick" if options.quick else "full",
        "runs": options.runs,
        "seed": options.seed,
        "boxes": f"{', '.join(names)}: namespaces of this machine, each with a Ray of its own",
        "jobs of a run": f"{which}; {num_steps} steps of a model of 100 thousand parameters; "
        "evaluations and checkpoints every 20 steps",
        "database": "sqlite",
    }
    if reason is not None:
        configuration["not covered"] = f"full disks ({reason})"
    title = "A job over several boxes under injuries" if is_spread else "Jobs of several boxes under injuries"
    report = Report(title, scratch, configuration)
    results = Results(options.file)
    report.add(*map(str, results.said))
    runs = plan_runs_of_boxes(
        options.runs,
        options.seed,
        names,
        num_steps=num_steps,
        is_spread=is_spread,
        disk_can_be_filled=fills_disks,
    )
    todo = [run for run in runs if run.number not in results.right]
    problems: list[str] = []
    if todo:
        stages = _Stages(scratch, options.boxes, is_spread=is_spread, fills_disks=fills_disks)
        try:
            undisturbed = stages.runs.run_undisturbed()
            facts = {"seed": options.seed, "boxes": options.boxes, "undisturbed job": undisturbed.record.digest}
            if is_spread:
                facts |= {"spread": True, "full disks": fills_disks}
            results.begin(facts, {DatabaseKind.SQLITE: undisturbed.took_s})
            report.add(results.said[-1])
            for run in todo:
                result = stages.runs.do_run(run, undisturbed)
                results.add(result)
                report.add(results.said[-1])
                if not result.is_right:
                    report.add(f"Their homes are kept in {stages.keep(run.number)}.")
            problems = stages.end()
        finally:
            stages.close()
    report.add(*problems)
    report_results(report, results.all, num_boxes=options.boxes, is_spread=is_spread)
    return 0 if not problems and {run.number for run in runs} <= results.right else 1
