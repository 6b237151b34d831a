"""`windlass doctor --network`: the boxes that are measured, and what is printed."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from windlass.service.cli.boxes import network
from windlass.service.cli.errors import reported
from windlass.service.cli.service import doctor
from windlass.service.cluster.head.network import NetworkCheck, NetworkEnd, PairRates, ProbeError


def box(name: str, *, state: str = "ready", running: int = 0) -> dict[str, Any]:
    return {
        "id": f"box-{name}",
        "name": name,
        "state": state,
        "link_host": f"10.0.0.{len(name)}",
        "jobs": {"running": {"total": running}},
    }


class Client:
    """Stands for the client of a service with boxes."""

    def __init__(self, *boxes: dict[str, Any]) -> None:
        self._boxes = list(boxes)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def boxes(self) -> list[dict[str, Any]]:
        return self._boxes


def run(
    monkeypatch: pytest.MonkeyPatch, home: Path, boxes: list[dict[str, Any]], *options: str
) -> tuple[Result, list[tuple[str, str]]]:
    """Runs the command. The network to a box that is called lost cannot be measured. Returns the pairs, too."""
    measured = []

    def measure(check: NetworkCheck, one: NetworkEnd, other: NetworkEnd) -> PairRates:
        measured.append((one.name, other.name))
        assert check._settings.link_host == boxes[0]["link_host"]
        if "lost" in (one.name, other.name):
            raise ProbeError(f"box {one.name} does not reach box {other.name}")
        return PairRates(there_bytes_per_s=1.25e9, back_bytes_per_s=1e9, round_trip_s=0.0001)

    monkeypatch.setattr(network, "open_client", lambda _settings: Client(*boxes))
    monkeypatch.setattr(NetworkCheck, "measure", measure)
    app = typer.Typer()
    app.command()(reported(doctor))
    return CliRunner().invoke(app, ["--home", str(home), *options]), measured


def test_ready_boxes_without_jobs_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boxes = [box("head"), box("attic"), box("busy", running=1), box("gone", state="away")]
    result, measured = run(monkeypatch, tmp_path, boxes, "--network")
    assert (result.exit_code, measured) == (0, [("head", "attic")])
    words = " ".join(result.output.split())
    for told in (
        "1 of 1: head and attic",
        "head attic 1.25 GB/s 1 GB/s 0.10 ms",
        "busy was left out: jobs run there",
        "gone was left out: it is away",
    ):
        assert told in words
    _, measured = run(monkeypatch, tmp_path, boxes, "--network", "--force")
    assert measured == [("head", "attic"), ("head", "busy"), ("attic", "busy")]


def test_pair_that_fails_is_told_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boxes = [box("head"), box("lost"), box("attic")]
    result, _ = run(monkeypatch, tmp_path, boxes, "--network")
    assert result.exit_code == 1
    assert "! box head does not reach box lost" in result.output
    assert "head  attic" in result.output
    result, _ = run(monkeypatch, tmp_path, boxes, "--network", "--json")
    told = json.loads(result.output)
    assert (len(told["pairs"]), len(told["problems"]), result.exit_code) == (1, 2, 1)
    assert told["pairs"][0]["there_bytes_per_s"] == 1.25e9
    assert told["problems"][0]["problem"] == "box head does not reach box lost"


@pytest.mark.parametrize(
    ("boxes", "options", "told"),
    [
        (
            [box("head")],
            ("--network",),
            "no box has joined this head; `windlass node code` prints the commands for one",
        ),
        (
            [box("head"), box("attic", state="away")],
            ("--network",),
            "there are no two boxes whose network could be measured; attic is left out: it is away",
        ),
        ([box("head"), box("busy", running=1)], ("--network",), "busy is left out: jobs run there"),
        ([box("head")], ("--force",), "--force goes with --network"),
        ([box("head")], ("--json",), "--json goes with --network"),
    ],
)
def test_command_that_can_measure_nothing_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, boxes: list[dict[str, Any]], options: tuple[str, ...], told: str
) -> None:
    result, measured = run(monkeypatch, tmp_path, boxes, *options)
    assert (result.exit_code, measured) == (2 if "goes with" in told else 1, [])
    assert told in " ".join(result.output.split())
