"""`windlass plan --find`, as users run it."""

import json
from pathlib import Path

import pytest

from tests.support.service.plan_command import JOB, run
from windlass.planner.planning import limits
from windlass.planner.solver.bisection import Goal
from windlass.service.cli.plan.printing import print_found


def test_plan_searches_for_extreme_numbers(shape: Path, home: Path) -> None:
    result = run("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--find", "fewest-ssds")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("fewest-ssds: 1 SSD (")
    assert "billion parameters" in result.output.splitlines()[0]


@pytest.mark.parametrize(
    ("goal", "number", "told"),
    [
        (Goal.LARGEST_BATCH, 512, "largest-batch: 512 examples (7 billion parameters)\n"),
        (Goal.LONGEST_CONTEXT, 4096, "longest-context: 4096 tokens (7 billion parameters)\n"),
        (Goal.MOST_LAYERS, 1, "most-layers: 1 layer (7 billion parameters)\n"),
        (Goal.FEWEST_SSDS, 2, "fewest-ssds: 2 SSDs (7 billion parameters)\n"),
        (Goal.SMALLEST_RAM, 1, "smallest-ram: 1 GiB (7 billion parameters)\n"),
        (Goal.SMALLEST_GPU, 12, "smallest-gpu: 12 GiB (7 billion parameters)\n"),
    ],
)
def test_number_that_is_found_has_its_unit(
    capsys: pytest.CaptureFixture[str], goal: Goal, number: int, told: str
) -> None:
    print_found(goal, number, 7_000_000_000)
    assert capsys.readouterr().out == told


def test_longest_context_is_no_longer_than_the_model_takes(home: Path) -> None:
    result = run("--model", "gpt2", "--hardware", "rtx4090", *JOB, "--find", "longest-context")
    assert result.exit_code == 0, result.output
    told = "longest-context: 1024 tokens, as many as the model takes (0.124 billion parameters)"
    assert result.output.splitlines()[0] == told
    assert "--set sequence_length=1024" in result.output


@pytest.mark.parametrize(("option", "number"), [("--lanes", 2), ("--gpus", 3)])
def test_largest_batch_is_searched_from_any_batch(
    shape: Path, home: Path, monkeypatch: pytest.MonkeyPatch, option: str, number: int
) -> None:
    monkeypatch.setattr(limits, "largest_fitting", lambda ask, profiles, *, most: 2)
    search = ("--batch-size", "1", option, str(number), "--find", "largest-batch", "--json")
    result = run("--model", str(shape), "--hardware", "a100-40g-server", "--seq-len", "64", *search)
    assert (json.loads(result.output)["number"], json.loads(result.output)["unit"]) == (2 * number, "examples")


def test_largest_batch_with_lanes_has_a_micro_batch_in_each(
    shape: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "largest_fitting", lambda ask, profiles, *, most: 3)
    search = ("--lanes", "2", "--find", "largest-batch", "--json")
    found = json.loads(run("--model", str(shape), "--hardware", "rtx4090-server", *JOB, *search).output)
    settings = {name: found["job_settings"][name] for name in ("batch_size", "num_microbatches", "lanes")}
    assert found["number"] == 6
    assert settings == {"batch_size": 6, "num_microbatches": 2, "lanes": 2}


def test_a_model_that_is_not_there_is_not_simulated(shape: Path, home: Path, tmp_path: Path) -> None:
    search = ("--find", "most-layers", "--trace", str(tmp_path / "trace.json"))
    result = run("--model", str(shape), "--hardware", "rtx4090-server", *JOB, *search)
    assert result.exit_code == 2
    assert "leave out --find most-layers" in result.output
