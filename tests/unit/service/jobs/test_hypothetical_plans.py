"""Plans of jobs that do not exist, and the settings of jobs with these plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.planning.gpu_choice import choose_gpus
from windlass.planner.planning.job_planning import question_of
from windlass.planner.planning.planner import answer
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question.plan_request import PlanRequest
from windlass.planner.question.report import PlanReport
from windlass.service.installation.settings import Settings
from windlass.service.jobs.hypothetical_plans import hypothetical_request, settings_of_plan
from windlass.service.validation.hyperparameters import WindlassSettings

SHAPE = ModelShape(num_layers=2, hidden_size=512, num_heads=4, vocab_size=1000, num_kv_heads=4)


def request_of(home: Path, machine: str, asked: WindlassSettings) -> PlanRequest:
    return hypothetical_request(
        Settings(home=home),
        machine_of(machine),
        None,
        model_dir=home,
        asked=asked,
        batch_size=asked.batch_size or 4,
        sequence_length=256,
    )


def plan_of(home: Path, machine: str, **values: Any) -> tuple[PlanReport, dict[str, Any]]:
    """Plans a job with these settings. Returns the plan, and the settings of a job with it."""
    asked = WindlassSettings.model_validate(values)
    request = request_of(home, machine, asked)
    question = question_of(request, ShapeConfig(shape=SHAPE, num_tokens=256))
    report = (choose_gpus(question).planned if question.chooses_ranks else answer(question)).report
    settings = settings_of_plan(asked, request.training, report)
    assert settings is not None
    return report, settings


@pytest.mark.parametrize(
    ("machine", "asked"),
    [
        ("rtx4090:gpus=2", {"gpus": "auto"}),
        ("rtx4090:gpus=2", {"gpus": 2, "clip_norm": 0.5}),
        pytest.param("rtx4090:gpus=2", {"gpus": "auto", "lanes": 2}, marks=pytest.mark.long),
        pytest.param(
            "rtx4090:gpus=4",
            {"gpus": "auto", "accumulation_precision": "bf16", "clip_norm": None},
            marks=pytest.mark.long,
        ),
    ],
)
def test_settings_of_a_plan_give_the_same_plan(tmp_path: Path, machine: str, asked: dict[str, Any]) -> None:
    report, settings = plan_of(tmp_path, machine, **asked)
    # Advice is about what the settings leave open.
    advice: dict[str, Any] = {"reasons": (), "least_gpu_gib": None, "least_gpu_reason": None}
    again, same = plan_of(tmp_path, machine, **settings)
    assert replace(again, **advice) == replace(report, **advice)
    assert same == settings


@pytest.mark.parametrize(("asked", "lanes"), [({"gpus": "auto"}, 1), ({"gpus": 2}, 1), ({"gpus": 2, "lanes": 2}, 2)])
def test_settings_of_a_plan_fix_the_lanes(tmp_path: Path, asked: dict[str, Any], lanes: int) -> None:
    windlass = WindlassSettings.model_validate(asked)
    training = request_of(tmp_path, "rtx4090:gpus=2", windlass).training
    report = PlanReport(feasible=True, reasons=(), choices={"num_microbatches": 4})
    settings = settings_of_plan(windlass, training, report)
    assert settings is not None
    assert settings.get("lanes") == lanes
