"""Plans made by a separate process: files in, files out."""

import errno
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
from windlass.engine.memory_estimate.model_facts import DeviceNeedUnknownError
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.answers import job_process, measure_process
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.model_shape import published_models
from windlass.planner.hardware.yaml_files import load
from windlass.planner.planning import job_planning as plan_job
from windlass.planner.planning import measuring_first
from windlass.planner.profiling.block_times import MAX_S
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import disturbed_path
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


def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the process that measures for the last question."""
    arguments = ["measure", "--question", str(tmp_path / "question.json"), "--result", str(tmp_path / "measured.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    measure_process.main()
    return json.loads((tmp_path / "measured.json").read_text())


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


def this_machine(tmp_path: Path) -> dict[str, Any]:
    """Returns the fields of a request for a CPU that this process measures, in a folder of their own."""
    hardware = load(Hardware, example_machines()["rtx4090-server"]).model_dump()
    hardware["gpus"]["count"] = 0
    about = {"compute_threads": 1, "is_alone": True, "kept_times_dir": str(tmp_path / "kept")}
    return {"hardware": hardware, "chooses_microbatches": True, **about}


def test_times_that_another_process_measures_are_told_as_lacking_after_an_estimate_by_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = pretend_to_measure(monkeypatch)
    asked = {**this_machine(tmp_path), "tells_estimate": True}
    estimate, progress = tmp_path / "result.estimate", tmp_path / "measured.progress"
    assert plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, measures_apart=True) == {
        "ok": True,
        "lacks_times": True,
    }
    told = JobPlan.from_json(json.loads(estimate.read_text()))
    assert told is not None
    assert (told.to_be_measured, told.report.times_from) == (True, "rates")
    assert measured == []

    assert measure(tmp_path, monkeypatch) == {"ok": True, "measured": 2, "alone": True}
    last = {"message": "measuring the model's blocks with 1 example of 16 tokens", "done": 1, "total": 2}
    assert json.loads(progress.read_text()) == last
    estimate.unlink()
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, measures_apart=True)
    assert found["plan"]["times_from"] == "blocks"
    told = JobPlan.from_json(json.loads(estimate.read_text()))
    assert told is not None
    assert (told.to_be_measured, told.report.times_from) == (False, "blocks")
    assert told.lacks_advice  # the estimate was there before, and the plan itself is told in its place
    assert told.report.step_s == found["plan"]["step_s"]
    assert plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, may_measure=False) == found
    assert measure(tmp_path, monkeypatch) == {"ok": True, "measured": 0, "alone": True}
    assert len(measured) == 2


def test_plan_that_leaves_blocks_unmeasured_goes_by_rates_and_tells_how_long_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = pretend_to_measure(monkeypatch)
    asked = {**this_machine(tmp_path), "leaves_unmeasured": True, "tells_estimate": True}
    by_rates = plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked)["plan"]
    assert (by_rates["times_from"], by_rates["measuring_s"]) == ("rates", 2 * MAX_S)  # two shapes of small blocks
    told = JobPlan.from_json(json.loads((tmp_path / "result.estimate").read_text()))
    assert told is not None
    assert not told.to_be_measured
    assert measured == []
    measure(tmp_path, monkeypatch)
    by_blocks = plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked)["plan"]
    assert (by_blocks["times_from"], by_blocks["measuring_s"]) == ("blocks", None)


def test_times_that_lack_are_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, lacking_times = [], measuring_first.lacking_times

    def look_up(*arguments: Any) -> Any:
        asked.append(arguments)
        return lacking_times(*arguments)

    monkeypatch.setattr(measuring_first, "lacking_times", look_up)
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, **this_machine(tmp_path), leaves_unmeasured=True)
    assert found["plan"]["measuring_s"] == 2 * MAX_S
    assert len(asked) == 1


def test_times_beside_which_a_job_computed_are_for_plans_beside_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_measure(monkeypatch)
    asked = {**this_machine(tmp_path), "measures_apart": True}
    plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked)
    disturbed_path(tmp_path / "measured.json").touch()
    assert measure(tmp_path, monkeypatch)["alone"] is False
    assert "lacks_times" in plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked)
    beside = plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked | {"is_alone": False})
    assert beside["plan"]["times_from"] == "blocks"


def test_times_of_a_published_shape_are_measured_apart_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend_to_measure(monkeypatch)
    asked = {**this_machine(tmp_path), "model_dir": str(published_models()["qwen2.5-0.5b"]), "batch_size": 1}
    assert "lacks_times" in plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, measures_apart=True)
    assert measure(tmp_path, monkeypatch) == {"ok": True, "measured": 1, "alone": True}
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, measures_apart=True)
    assert found["plan"]["times_from"] == "blocks"
    assert len(measured) == 1


def test_times_of_changes_are_measured_with_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend_to_measure(monkeypatch)
    asked = this_machine(tmp_path)
    plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, measures_apart=True)
    measure(tmp_path, monkeypatch)
    asked["what_if"] = True
    assert "lacks_times" in plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, measures_apart=True)
    assert measure(tmp_path, monkeypatch) == {"ok": True, "measured": 2, "alone": True}, (
        "those of a batch twice as large"
    )
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, measures_apart=True)
    keys = {"ssds", "ram", "batch", "clip", "split_states", "bf16_states", "box"}
    assert {row["key"] for row in found["plan"]["what_if"]} == keys
    assert not (tmp_path / "result.estimate").exists(), "the request did not ask for it"
    plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, measures_apart=True, tells_estimate=True)
    told = JobPlan.from_json(json.loads((tmp_path / "result.estimate").read_text()))
    assert told is not None
    assert told.num_changes_left == 1
    assert {row.key for row in told.report.what_if or ()} == keys - {"box"}
    assert [(model.num_examples, model.num_tokens) for model in measured] == [(2, 16), (1, 16), (4, 16), (2, 16)]


def test_a_job_that_does_not_fit_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend_to_measure(monkeypatch)
    asked = {**this_machine(tmp_path), "device_memory_nbytes": 1024}
    for more in ({"measures_apart": True}, {}):
        assert not plan(tmp_path, config_of("Qwen2"), monkeypatch, **asked, **more)["plan"]["feasible"]
    assert measured == []


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
    raising(monkeypatch, DeviceNeedUnknownError("shapes follow from the data"))
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch)
    assert found == {"ok": True, "warnings": ["no plan was made: shapes follow from the data"]}


def raising(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def answer(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(plan_job, "answer", answer)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("max() arg is an empty sequence"), "error"),
        (RuntimeError("can't do this"), "error"),
        (FileNotFoundError("a file of ours"), "error"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "memory"),
    ],
)
def test_an_error_that_the_request_did_not_cause_is_no_refusal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    failure: str,
) -> None:
    raising(monkeypatch, error)
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch)
    told = f"no plan was made: {type(error).__name__}: {error}"
    assert found == {"ok": True, "warnings": [told], "failure": failure}
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "no-such"},
        {"model_type": ["llama"]},
        {"model_type": "t5"},
        {"model_type": "llama", "vocab_size": 0},
        {"model_type": "qwen2", "hidden_size": -3},
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any]
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    found = plan(tmp_path, config_of("Qwen2"), monkeypatch, model_dir=str(folder))
    assert found["error"]["code"] == "invalid_model", found
    assert found["error"]["param"] == "model"


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
