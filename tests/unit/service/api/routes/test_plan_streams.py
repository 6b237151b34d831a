"""Plans over HTTP as a stream: an estimate comes first, and a plan whose client has gone is ended."""

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import yaml
from fastapi.testclient import TestClient

from tests.unit.service.api.routes.test_plans import MACHINE, planning
from windlass.planner.profiling.block_times import MAX_S
from windlass.planner.question.plan_request import abandoned_path
from windlass.service.api import plan_run
from windlass.service.api.middleware.rate_limit import BusyError, RateLimits, Turnstile
from windlass.service.api.plan_run import PlanRun
from windlass.service.installation.settings import HARDWARE_FILE, Settings
from windlass.service.preparation.sandbox.process import start_limited
from windlass.service.preparation.steps import PLAN_JOB, PreparationStep
from windlass.service.validation import ApiError

__all__ = ["planning"]  # the fixture

BODY: dict[str, Any] = {
    "model": "llama",
    "batch_size": 4,
    "hardware": MACHINE,
    "windlass": {"clip_norm": None, "sequence_length": 64},
}
# Waits for the file whose path is the last argument.
_WAITING = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[-1]).exists(): time.sleep(0.01)"


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names and the data of a stream's events."""
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        events.append((fields["event"], json.loads(fields["data"])))
    return events


def test_an_estimate_comes_before_the_plan(planning: TestClient) -> None:
    answer = planning.post("/v1/fine_tuning/plans", json={**BODY, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    described = planning.get("/openapi.json").json()["paths"]["/v1/fine_tuning/plans"]["post"]["responses"]["200"]
    assert described["content"].keys() == {"application/json", "text/event-stream"}
    (first, estimate), *others, (last, plan) = events_of(answer.text)
    assert (first, last) == ("fine_tuning.plan.estimate", "fine_tuning.plan")
    for kind, early in others:  # it may be read too late
        assert kind == "fine_tuning.plan.without_advice"
        advice = {key: plan[key] for key in ("reasons", "least_gpu_gib", "least_gpu_reason")}
        assert {**early, **advice} == plan
    assert estimate["estimated"]
    assert not estimate["to_be_measured"]
    assert "estimated" not in plan
    assert estimate["feasible"]
    assert 0 < estimate["step_s"] <= plan["step_s"]
    assert plan == planning.post("/v1/fine_tuning/plans", json=BODY).json()


@pytest.mark.long
def test_rows_of_changes_come_one_after_the_other(planning: TestClient) -> None:
    answer = planning.post("/v1/fine_tuning/plans", json={**BODY, "stream": True, "what_if": True})
    (first, _), *others, (last, plan) = events_of(answer.text)
    assert (first, last) == ("fine_tuning.plan.estimate", "fine_tuning.plan")
    kinds = [kind for kind, _ in others]
    assert kinds == sorted(kinds, key=("fine_tuning.plan.without_advice", "fine_tuning.plan.changes").index)
    changes = [data for kind, data in others if kind == "fine_tuning.plan.changes"]
    num_rows, num_left = zip(*((len(each["what_if"]), each["num_changes_left"]) for each in changes), strict=True)
    assert list(num_rows) == sorted(set(num_rows))
    assert {rows + left for rows, left in zip(num_rows, num_left, strict=True)} == {len(plan["what_if"])}
    assert "num_changes_left" not in plan
    rest = {"what_if", "num_changes_left"}
    for each in changes:
        assert {key: value for key, value in each.items() if key not in rest} == {
            key: value for key, value in plan.items() if key not in rest
        }


def test_what_cannot_be_planned_is_refused_before_the_stream_or_in_it(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = planning.post("/v1/fine_tuning/plans", json={**BODY, "model": "no-such", "stream": True})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"

    def poll(_: PlanRun) -> None:
        raise ApiError("model: it has no layers", param="model", code="not_planned")

    monkeypatch.setattr(PlanRun, "poll", poll)
    answer = planning.post("/v1/fine_tuning/plans", json={**BODY, "stream": True})
    ((kind, told),) = events_of(answer.text)
    assert kind == "error"
    assert (told["error"]["param"], told["error"]["code"]) == ("model", "not_planned")


@pytest.mark.parametrize("stream", [True, False])
def test_the_place_of_a_plan_whose_client_has_gone_is_free_again(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    polled, closed, close = threading.Event(), threading.Event(), PlanRun.close

    def close_and_tell(run: PlanRun) -> None:
        close(run)
        closed.set()

    monkeypatch.setattr(PlanRun, "poll", lambda _: polled.set())  # the plan is never done
    monkeypatch.setattr(PlanRun, "close", close_and_tell)
    body = json.dumps({**BODY, "stream": stream}).encode()
    headers = [(b"host", planning.base_url.netloc), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/fine_tuning/plans",
        "raw_path": b"/v1/fine_tuning/plans",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
    }
    requests = iter([{"type": "http.request", "body": body}])

    async def receive() -> dict[str, Any]:
        if (request := next(requests, None)) is not None:
            return request
        while not polled.is_set():
            await anyio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(_: dict[str, Any]) -> None:
        pass

    async def ask() -> None:
        with anyio.fail_after(30):
            await planning.app(scope, receive, send)  # type: ignore[arg-type]

    planning.portal.call(ask)  # type: ignore[union-attr]
    assert closed.wait(30)
    until_s = time.monotonic() + 30
    while not is_free(planning.app.state.context.limits.plans):  # type: ignore[attr-defined]
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_free(turnstile: Turnstile) -> bool:
    """Returns whether the user has no place."""
    try:
        with turnstile.entered(None):
            return True
    except BusyError:
        return False


def test_a_planner_whose_plan_nobody_awaits_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it would have to learn again what it knows of the models."""

    def steps(folder: Path, _: object) -> list[PreparationStep]:
        result = folder / "result.json"
        command = (sys.executable, "-c", _WAITING, str(abandoned_path(result)))
        return [PreparationStep(name=PLAN_JOB, command=command, result_path=result, timeout_s=60)]

    monkeypatch.setattr(plan_run, "plan_steps_apart", steps)
    planner, limits = SimpleNamespace(start=start_limited), RateLimits(60)
    context: Any = SimpleNamespace(settings=Settings(home=tmp_path), planner=planner, limits=limits)
    run = PlanRun(context, None, None)  # type: ignore[arg-type]
    assert run.poll() is None
    process = run._preparation.process
    assert process is not None
    run.close()
    assert process.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_stream_waits_for_the_users_plan_before(planning: TestClient) -> None:
    plans = planning.app.state.context.limits.plans  # type: ignore[attr-defined]
    place = plans.entered(None)
    place.__enter__()
    threading.Timer(0.3, place.__exit__, (None, None, None)).start()
    answer = planning.post("/v1/fine_tuning/plans", json={**BODY, "stream": True})
    assert events_of(answer.text)[-1][0] == "fine_tuning.plan"


def test_a_failure_in_a_stream_is_told(planning: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def poll(_: PlanRun) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(PlanRun, "poll", poll)
    answer = planning.post("/v1/fine_tuning/plans", json={**BODY, "stream": True})
    ((kind, told),) = events_of(answer.text)
    assert (kind, told["error"]["type"]) == ("error", "server_error")


@pytest.mark.long
def test_this_machine_is_estimated_by_its_rates_then_measured_and_then_planned(planning: TestClient) -> None:
    cpu = MACHINE | {"gpus": MACHINE["gpus"] | {"count": 0}}
    (planning.app.state.context.settings.home / HARDWARE_FILE).write_text(yaml.safe_dump(cpu))  # type: ignore[attr-defined]
    body = {name: value for name, value in BODY.items() if name != "hardware"}

    def stream() -> list[tuple[str, dict[str, Any]]]:
        return events_of(planning.post("/v1/fine_tuning/plans", json={**body, "stream": True}).text)

    by_rates = planning.post("/v1/fine_tuning/plans", json={**body, "measure": False}).json()
    assert (by_rates["times_from"], by_rates["measuring_s"]) == ("rates", 3 * MAX_S)
    (first, estimate), *others, (last, plan) = stream()
    assert (first, last) == ("fine_tuning.plan.estimate", "fine_tuning.plan")
    assert (estimate["estimated"], estimate["to_be_measured"], estimate["times_from"]) == (True, True, "rates")
    assert plan["times_from"] == "blocks"
    told = [data for kind, data in others if kind == "fine_tuning.plan.progress"]
    assert [(each["done"], each["total"]) for each in told] == [(0, 3), (1, 3), (2, 3)]
    assert told[0]["message"] == "measuring the model's blocks with 4 examples of 64 tokens"
    again = stream()
    assert [kind for kind, _ in again] == ["fine_tuning.plan.estimate", "fine_tuning.plan"]
    assert again[0][1]["times_from"] == "blocks"
    assert again[-1][1]["choices"] == plan["choices"]
    known = planning.post("/v1/fine_tuning/plans", json={**body, "measure": False}).json()
    assert (known["times_from"], known["measuring_s"]) == ("blocks", None)
