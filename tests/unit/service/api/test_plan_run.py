"""The making of a plan: its turns beside measurements, and what a failed planner is told as."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.planner.question.plan_request import abandoned_path
from windlass.planner.question.report import PlanReport
from windlass.service.api import plan_run
from windlass.service.api.middleware.rate_limit import BusyError, RateLimits
from windlass.service.api.plan_run import PlanRun
from windlass.service.installation.settings import Settings
from windlass.service.preparation.memory import PreparationMemory
from windlass.service.preparation.sandbox.process import start_limited
from windlass.service.preparation.steps import MEASURE_BLOCKS, PLAN_JOB, LaterStep, PreparationStep
from windlass.service.validation import ApiError

PLAN = {"ok": True, "plan": {"feasible": True, "reasons": [], "step_s": 2.0}}
NO_MEMORY = {"ok": True, "warnings": ["no plan was made: MemoryError: "], "failure": "memory"}
DEFECT = {"ok": True, "warnings": ["no plan was made: ValueError: empty"], "failure": "error"}
LACKS_TIMES = {"ok": True, "lacks_times": True}
KILLED, SLOW = "killed", "slow"  # in the place of an answer
# Writes the second argument to the file of the first one, and waits before for the file of the third one.
_CODE = """
import os, pathlib, signal, sys, time
print("Traceback of the planner", flush=True)
while len(sys.argv) > 3 and not pathlib.Path(sys.argv[3]).exists(): time.sleep(0.01)
signals = {'"killed"': signal.SIGKILL, '"slow"': signal.SIGXCPU}
if (number := signals.get(sys.argv[2])): os.kill(os.getpid(), number)
pathlib.Path(sys.argv[1]).write_text(sys.argv[2])
"""


class Planners:
    """Stands in for the planner's processes: each plan gets the next of the given answers."""

    def __init__(self, home: Path, *answers: Any) -> None:
        self.home, self.limits = home, RateLimits(60)
        self.num_renewed, self.num_begun = 0, 0
        self.is_alone = True  # no job computes on this machine
        self.measured = home / "measured"  # a measurement ends once this file is there
        self._answers = list(answers)

    @property
    def context(self) -> Any:
        planner = SimpleNamespace(start=start_limited, renew=self._renew)
        return SimpleNamespace(settings=Settings(home=self.home), planner=planner, limits=self.limits)

    def steps(self, folder: Path, measures: bool) -> list[PreparationStep | LaterStep]:
        first = _step(folder, PLAN_JOB, json.dumps(self._answers.pop(0)))
        if not measures:
            return [first]
        return [
            first,
            replace(
                _step(folder, MEASURE_BLOCKS, '{"ok": true}', str(self.measured)), instead=_step(folder, PLAN_JOB, "{}")
            ),
            _step(folder, PLAN_JOB, json.dumps(PLAN)),
        ]

    def _renew(self) -> None:
        with pytest.raises(BusyError), self.limits.plans.entered("another"):
            pass  # else the old process would make this plan, and not be renewed
        self.num_renewed += 1


def _step(folder: Path, name: str, *arguments: str) -> PreparationStep:
    result = folder / f"{name}.json"
    command = (sys.executable, "-c", _CODE, str(result), *arguments)
    return PreparationStep(name=name, command=command, result_path=result, timeout_s=60)


@pytest.fixture
def planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Planners]:
    def make(*answers: Any) -> Planners:
        made = Planners(tmp_path, *answers)
        monkeypatch.setattr(plan_run, "plan_steps_apart", made.steps)
        monkeypatch.setattr(plan_run, "no_job_runs", lambda _: made.is_alone)
        return made

    return make


@contextmanager
def running(planners: Planners, *, measures: bool = False) -> Iterator[PlanRun]:
    """Begins a plan. `measures`: in the place of the request."""
    run = PlanRun(planners.context, None, measures)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        run.close()


def finish(run: PlanRun) -> PlanReport:
    until_s = time.monotonic() + 60
    while (report := run.poll()) is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return report


def test_plan_is_asked_for_again_in_a_fresh_process_if_memory_ran_out(planners: Callable[..., Planners]) -> None:
    made = planners(NO_MEMORY, PLAN)
    with running(made) as run:
        assert finish(run).step_s == 2.0
    assert made.num_renewed == 1


@pytest.mark.parametrize(
    ("answers", "status", "code", "told", "num_renewed"),
    [
        ([NO_MEMORY, NO_MEMORY], 503, "no_memory", "try again when less runs on this machine", 1),
        ([KILLED, KILLED], 503, "no_memory", "try again when less runs on this machine", 1),
        ([DEFECT], 500, "planner_failed", "ValueError: empty", 0),
        ([SLOW], 500, "planner_failed", "of CPU time", 0),
        (["no object", "no object"], 500, "planner_failed", "left no result", 1),
    ],
)
def test_failed_planner_is_an_error_of_the_server_and_logged(
    planners: Callable[..., Planners],
    caplog: pytest.LogCaptureFixture,
    answers: list[Any],
    status: int,
    code: str,
    told: str,
    num_renewed: int,
) -> None:
    made = planners(*answers)
    with caplog.at_level(logging.ERROR), running(made) as run, pytest.raises(ApiError) as raised:
        finish(run)
    error = raised.value
    assert (error.status, error.code, error.kind, error.param) == (status, code, "server_error", None)
    assert told in error.message
    assert made.num_renewed == num_renewed
    assert "Traceback of the planner" in caplog.text


def test_other_plans_are_made_while_one_measures(planners: Callable[..., Planners]) -> None:
    made = planners(LACKS_TIMES, LACKS_TIMES, PLAN)
    with running(made, measures=True) as first, running(made, measures=True) as second:
        told = []
        while not any("waiting" in each["message"] for each in told):
            for run in (first, second):
                assert run.poll() is None
                told += [] if (progress := run.progress()) is None else [progress]
            time.sleep(0.01)
        with running(made) as third:
            assert finish(third).step_s == 2.0
        assert first.poll() is second.poll() is None
        made.measured.touch()
        assert finish(first).step_s == finish(second).step_s == 2.0


def test_plan_that_waits_too_long_for_its_turn_is_refused_without_a_word_of_keys(
    planners: Callable[..., Planners], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_run, "_WAIT_S", 0.05)
    made = planners(PLAN, PLAN)
    with made.limits.plans.entered(None), running(made) as run, pytest.raises(ApiError) as raised:
        finish(run)
    assert (raised.value.status, raised.value.code) == (429, "plan_in_progress")
    assert raised.value.message == "plans are made one by one: another one is not done yet; try again in a minute"
    with running(made) as run:
        assert finish(run).step_s == 2.0


def test_plan_that_waited_for_a_measurement_waits_for_memory_as_well(
    planners: Callable[..., Planners], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planners(LACKS_TIMES)
    with running(made, measures=True) as run:
        with made.limits.measurements.entered("another"):
            while run.progress() is None:
                assert run.poll() is None
            monkeypatch.setattr(plan_run, "_WAIT_S", 0.0)
            assert run.poll() is None
        with monkeypatch.context() as patched:
            patched.setattr(PreparationMemory, "free_nbytes", lambda _: 0)
            assert run.poll() is None
        monkeypatch.setattr(plan_run, "_WAIT_S", 60.0)
        made.measured.touch()
        assert finish(run).step_s == 2.0


def test_abandoned_plan_does_not_measure(planners: Callable[..., Planners], monkeypatch: pytest.MonkeyPatch) -> None:
    made = planners(LACKS_TIMES)

    def steps(folder: Path, measures: bool) -> list[PreparationStep | LaterStep]:
        (first, *others), told = made.steps(folder, measures), abandoned_path(folder / f"{PLAN_JOB}.json")
        assert isinstance(first, PreparationStep)
        return [replace(first, command=(*first.command, str(told))), *others]

    monkeypatch.setattr(plan_run, "plan_steps_apart", steps)
    with running(made, measures=True) as run:
        assert run.poll() is None
    assert run._step is not None
    assert run._step.name == PLAN_JOB


def test_abandoned_measurement_is_ended_at_once(planners: Callable[..., Planners]) -> None:
    made = planners(LACKS_TIMES)
    with running(made, measures=True) as run:
        while run._preparation.process is None or run._step is None or run._step.name != MEASURE_BLOCKS:
            assert run.poll() is None
        process = run._preparation.process
        began_s = time.monotonic()
    assert process.wait() < 0
    assert time.monotonic() - began_s < plan_run._ABANDONED_S
    with made.limits.measurements.entered(None):
        pass
    assert list(made.home.iterdir()) == []


def test_measurement_is_told_of_a_job_that_began_while_it_waited(planners: Callable[..., Planners]) -> None:
    made = planners(LACKS_TIMES)
    with running(made, measures=True) as run:
        with made.limits.measurements.entered("another"):
            while run.progress() is None:
                assert run.poll() is None
            made.is_alone = False
        while run._preparation.process is None:
            assert run.poll() is None
        assert run._step is not None
        assert run._step.name == MEASURE_BLOCKS
        assert run._step.disturbed_path.exists()
