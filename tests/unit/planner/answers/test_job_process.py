"""Plans made by a separate process: files in, files out."""

import gc
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from transformers import PretrainedConfig

from tests.support.engine.architectures import ARCHITECTURES
from tests.support.planner.pretend_measurement import pretend_to_measure
from windlass.actors.timeline.span_files import SIMULATED_FOLDER, held_steps, load_step
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.answers import job_process
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.yaml_files import load
from windlass.planner.planning import job_planning as plan_job
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.question import PlanQuestion
from windlass.planner.solver.program.relaxed_program import RelaxedProgram


def plan(tmp_path: Path, config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    config.save_pretrained(tmp_path / "model")
    names = [field.name for field in fields(TrainingConfig)]
    training = {"batch_size": 2, "sequence_length": 16, "total_steps": 1}
    training |= {name: changes.pop(name) for name in names if name in changes}
    question = {
        "model_dir": str(tmp_path / "model"),
        "hardware": load(Hardware, example_machines()["rtx4090-server"]).model_dump(),
        "training": training,
        "num_optimizers": 1,
        "host_memory_nbytes": None,
        "device_memory_nbytes": None,
        **changes,
    }
    (tmp_path / "question.json").write_text(json.dumps(question))
    arguments = ["plan_job", "--question", str(tmp_path / "question.json"), "--result", str(tmp_path / "result.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    job_process.main()
    return json.loads((tmp_path / "result.json").read_text())


def config_of(name: str) -> Any:
    config = ARCHITECTURES[name].config(tied=False, dropout=0.0)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    return config


def test_a_plan_and_what_the_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch)
    assert found["ok"]
    assert found["plan"]["feasible"]
    job_plan = JobPlan.from_json(found)
    assert job_plan is not None
    assert job_plan.placement is not None
    assert len(job_plan.placement.activations) == len(config_of("Qwen2").layer_types)
    assert found["arena_nbytes"] > 0
    assert found["plan"]["engine_gib"]["host"] == found["arena_nbytes"] / 2**30
    assert all(found["plan"]["engine_gib"][tier] <= gib for tier, gib in found["plan"]["limit_gib"].items())
    assert "simulated" not in found


def test_programs_of_a_question_are_forgotten_with_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm process plans one job after the other, and each has some hundred programs of HiGHS."""
    made: list[ReferenceType[RelaxedProgram]] = []
    make = RelaxedProgram.__init__

    def noted(program: RelaxedProgram, *arguments: Any) -> None:
        made.append(ref(program))
        make(program, *arguments)

    monkeypatch.setattr(RelaxedProgram, "__init__", noted)
    for batch_size in (2, 4):
        num_made = len(made)
        assert plan(tmp_path, config_of("Qwen2"), monkeypatch, batch_size=batch_size)["ok"]
        assert len(made) > num_made
        gc.collect()
        assert not any(each() for each in made)


@pytest.mark.long
def test_measured_times_are_reused_for_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend_to_measure(monkeypatch)
    hardware = load(Hardware, example_machines()["rtx4090-server"]).model_dump()
    hardware["gpus"]["count"] = 0
    asked = {"hardware": hardware, "compute_threads": torch.get_num_threads(), "is_alone": True}
    kept = {**asked, "kept_times_dir": str(tmp_path / "kept")}
    first, second = (plan(tmp_path, config_of("Qwen2"), monkeypatch, **kept) for _ in range(2))
    assert first == second
    assert any("computes twice as fast" in reason for reason in first["plan"]["reasons"])
    assert first["plan"]["step_s"] >= 0.75 * (2 + len(config_of("Qwen2").layer_types)), "by what was measured"
    assert len(measured) == 1
    assert plan(tmp_path, config_of("Qwen2"), monkeypatch, **kept, may_measure=False) == first
    unknown = plan(tmp_path, config_of("Qwen2"), monkeypatch, **kept, may_measure=False, sequence_length=8)
    assert unknown["plan"]["step_s"] < 0.75
    assert len(measured) == 1
    plan(tmp_path, config_of("Qwen2"), monkeypatch, **kept, sequence_length=8)
    plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked)
    assert len(measured) == 3


@pytest.mark.short("bf16")
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_experts_are_planned_in_every_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    assert plan(tmp_path, config_of("Mixtral"), monkeypatch, precision=precision)["plan"]["feasible"]


def test_the_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, host_memory_nbytes=24 << 20)
    assert found["plan"]["feasible"]
    assert found["arena_nbytes"] <= 24 << 20


def test_job_that_does_not_fit_gets_an_answer_without_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, device_memory_nbytes=1024)
    assert found["ok"]
    assert not found["plan"]["feasible"]
    assert "placement" not in found
    assert found["plan"]["missing_bytes"]["gpu"] > 0
    assert found["plan"]["limit_gib"]["gpu"] == 1024 / 2**30


def test_a_model_that_cannot_be_gone_through_by_shapes_gets_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("shapes follow from the data")

    monkeypatch.setattr(plan_job, "answer", refuse)
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch)
    assert found == {"ok": True, "warnings": ["no plan was made: RuntimeError: shapes follow from the data"]}


def test_model_path_that_is_no_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, model_dir=str(tmp_path / "nothing"))
    assert not found["ok"]
    assert found["error"]["param"] == "model"


def test_plan_is_simulated_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, simulation_s=600.0)
    simulated, folder = found["simulated"], tmp_path / SIMULATED_FOLDER
    assert simulated["step_s"] == found["plan"]["step_s"] >= found["plan"]["bound_s"]
    (step,) = held_steps(folder)
    held = load_step(folder, step)
    assert held is not None
    assert held.summary == simulated["summary"]
    assert "gpu-0/compute" in held.summary["busy_s"]
    assert "warnings" not in found


def test_a_simulation_that_takes_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, simulation_s=1e-9)
    assert found["plan"]["feasible"]
    assert "simulated" not in found
    (warning,) = found["warnings"]
    assert "it takes longer than 1e-09 s" in warning
    assert not (tmp_path / SIMULATED_FOLDER).exists()


def test_a_running_job_is_planned_again_with_the_order_that_its_plan_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"update_order": "active", "clip_norm": None}
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, chooses_order=True)
    questions: list[PlanQuestion] = []

    def correct(question: PlanQuestion, *_: object, **__: object) -> None:
        questions.append(question)
        raise RuntimeError("the question is enough")

    monkeypatch.setattr(plan_job, "load_measured", lambda *_, **__: [None] * plan_job.MIN_STEPS)
    monkeypatch.setattr(plan_job, "correct", correct)
    running: dict[str, Any] = {"timeline_dir": str(tmp_path), "first_step": 3, "num_steps_left": 100, "restart_s": 1.0}
    found["plan"]["choices"]["gradient_updates"] = "kept"
    running["plan"] = {name: value for name, value in found.items() if name != "ok"}
    plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, chooses_order=True, running=running)
    (question,) = questions
    assert (question.training.update_order, question.chooses_order) == ("kept", False)
