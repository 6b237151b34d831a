"""Killed processes of a preparation leave events on their job, whatever happens to the job."""

import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage
from tests.unit.service.dispatcher.replanning.test_replanner_changed_machine import (
    Measured,
    machine,
    measured,
    paused_job,
)
from tests.unit.service.dispatcher.replanning.test_replanner_measured_steps import asked
from windlass.planner.question.plan_request import PlanRequest
from windlass.service.preparation.pipeline import Preparation
from windlass.service.preparation.steps import (
    CHECK_MODEL,
    DOWNLOAD_MODEL,
    PLAN_JOB,
    PREPARE_DATA,
    PreparationOrder,
    PreparationStep,
)
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import JobEvent
from windlass.storage.sql.repositories.events import EventRepository

__all__ = ["measured"]  # a fixture

_KILLED = "os.kill(os.getpid(), 9)"
_BY_SIGNAL = r"was killed by signal 9 \(SIGKILL\) after \d+ s, most likely because the machine ran out of memory"


def _step(folder: Path, name: str, code: str) -> PreparationStep:
    result = folder / f"{name}.json"
    program = f"import os, sys; result = {str(result)!r}; {code}"
    return PreparationStep(name=name, command=(sys.executable, "-S", "-c", program), result_path=result, timeout_s=60)


def _answering(answer: dict[str, Any]) -> str:
    return f"open(result, 'w').write({json.dumps(answer)!r})"


def _tick_until(stage: Stage, is_done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < until_s, "it did not come to that"
        stage.tick()
        time.sleep(0.02)


def _events(stage: Stage, job_id: str) -> list[JobEvent]:
    with stage.database.read() as session:
        return list(EventRepository(session).since(0, limit=1000, job_id=job_id))


@pytest.mark.parametrize("name", [DOWNLOAD_MODEL, CHECK_MODEL, PREPARE_DATA, PLAN_JOB])
def test_a_job_whose_preparation_is_killed_fails_with_an_event(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def prepare(order: PreparationOrder) -> Preparation:
        return Preparation([_step(order.work_dir, name, _KILLED)], work_dir=order.work_dir)

    monkeypatch.setattr(stage.dispatcher._preparations, "_prepare", prepare)
    job_id = stage.submit()
    _tick_until(stage, lambda: stage.status(job_id) is JobStatus.FAILED)
    error = stage.job(job_id).error
    assert error is not None
    assert (error["code"], error["param"]) == (f"{name}_failed", None)
    assert re.search(rf"{_BY_SIGNAL}.* Wait until .*add memory, and submit the job again$", error["message"])
    last = _events(stage, job_id)[-1]
    assert (last.level, last.message) == ("error", f"The job failed: {error['message']}")


def test_a_job_whose_measuring_planner_is_killed_is_told_and_planned_without_measuring(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(order: PreparationOrder) -> Preparation:
        folder = order.work_dir
        results = {name: {"ok": True, **PREPARED[name]} for name in (CHECK_MODEL, PREPARE_DATA)}
        steps = [_step(folder, name, _answering(result)) for name, result in results.items()]
        instead = _step(folder, PLAN_JOB, _answering({"ok": True, "warnings": ["no plan was made: shapes"]}))
        words = "It begins anew without measuring the model's blocks"
        planner = dataclasses.replace(_step(folder, PLAN_JOB, _KILLED), instead=instead, instead_in_words=words)
        return Preparation([*steps, planner], work_dir=folder)

    monkeypatch.setattr(stage.dispatcher._preparations, "_prepare", prepare)
    job_id = stage.submit()
    _tick_until(stage, lambda: stage.status(job_id) is JobStatus.RUNNING)
    warnings = [event for event in _events(stage, job_id) if event.level == "warn"]
    killed, *others = [event.message for event in warnings]
    assert re.match(
        rf"Planning {_BY_SIGNAL}.*, and left no result\. It begins anew without measuring the model's blocks$", killed
    )
    assert "no plan was made: shapes" in others
    # It is reported when it happens, and not with the plan, which may take as long again.
    assert warnings[0].ordinal < min(event.ordinal for event in _events(stage, job_id) if "validated" in event.message)


def test_a_plan_that_is_corrected_by_a_planner_that_is_killed_stays_and_the_job_is_told(stage: Stage) -> None:
    job_id, _ = asked(stage)
    held = stage.dispatcher._corrections._running
    assert held is not None
    folder = stage.settings.home / "killed"
    killed = Preparation([_step(folder, PLAN_JOB, _KILLED)], work_dir=folder)
    stage.dispatcher._corrections._running = dataclasses.replace(held, preparation=killed)
    _tick_until(stage, lambda: stage.job(job_id).plan_number == 1)
    last = _events(stage, job_id)[-1]
    assert last.level == "warn"
    assert re.match(rf"The plan could not be made again .*, and stays: planning {_BY_SIGNAL}", last.message)
    assert stage.status(job_id) is JobStatus.RUNNING


def test_a_plan_that_is_renewed_by_a_planner_that_is_killed_stays_and_the_job_is_told(
    stage: Stage, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = paused_job(stage)

    def ask(work_dir: Path, _request: PlanRequest) -> Preparation:
        return Preparation([_step(work_dir, PLAN_JOB, _KILLED)], work_dir=work_dir)

    monkeypatch.setattr(stage.dispatcher._renewals, "_ask", ask)
    measured.hardware = machine(1.0)
    stage.request_resume(job_id)
    _tick_until(stage, lambda: stage.status(job_id) is JobStatus.RUNNING)
    told = [event for event in _events(stage, job_id) if event.level == "warn"][-1].message
    assert re.match(rf"The machine was measured again, but .* the previous plan is kept: planning {_BY_SIGNAL}", told)
