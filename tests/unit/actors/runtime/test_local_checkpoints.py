"""All actors in one process: checkpoints requested by evaluations, and jobs that end before their last step."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cut_off import CutOff, run_attempt
from tests.support.training import (
    exported_params,
    has_direct_io,
    journal_of,
    leftovers_of,
    make_partition,
    make_spec,
    metrics_of,
)
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import CommitStore, ComputeBlocks, ExportModel, Message, Phase, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.checkpoint.model_folder import folder_nbytes
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.training_config.training_config import EarlyStopping, FinalModel
from windlass.storage.ids import ActorName, Precision

TOTAL_STEPS = 8
HOST = Placement(host_blocks=(0, 1, 2, 3, 4), commit_every=10)
MIXED = Placement(host_blocks=(1,), device_blocks=(0, 3), num_cached_params=5, commit_every=3)
WHERE = ("before the decision", "before the export", "after it", "before the last export")
OPTIONS: dict[str, Any] = {"early_stopping": EarlyStopping(patience=2), "final_model": FinalModel.BEST}


def job(root: Path, **changes: Any) -> JobSpec:
    """A job whose losses soon rise, because the learning rate is far too high."""
    options: dict[str, Any] = {
        "precision": Precision.BF16,
        "num_microbatches": 2,
        "clip_norm": 0.5,
        "dropout": 0.1,
        "total_steps": TOTAL_STEPS,
        "evaluate_every": 1,
        "learning_rate": 0.02,
        "warmup_steps": 6,
    }
    return make_spec(root, **(options | changes))


def params_of(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_same(params: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert params.keys() == expected.keys()
    for name, param in params.items():
        assert torch.equal(param, expected[name]), name


def folders_of(spec: JobSpec) -> list[str]:
    return sorted(
        path.name for path in Path(spec.output_dir).parent.iterdir() if path.name.lstrip(".").startswith("out")
    )


@pytest.fixture(scope="module")
def each_step(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    """The same job with an export after every step."""
    spec = job(tmp_path_factory.mktemp("each"), checkpoint_every=1)
    outcome = run_attempt(spec)
    assert outcome is not None
    assert outcome["status"] == "succeeded"
    return spec


def expected_best(spec: JobSpec) -> tuple[int, int]:
    """The step with the lowest validation loss before the job ends, and the step at which it ends.

    The job ends after two evaluations that did not improve the loss.
    """
    best = (0, float("inf"))
    for step, loss in sorted(metrics_of(spec, "valid_loss").items()):
        if loss < best[1]:
            best = (step, loss)
        elif step - best[0] == 2:
            return best[0], step
    raise AssertionError("the losses never stop falling: the job of these tests does not end early")


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(Placement(), id="ssd", marks=pytest.mark.long),
        pytest.param(HOST, id="host", marks=pytest.mark.long),
        pytest.param(MIXED, id="mixed"),
    ],
)
def test_best_and_last_checkpoints_equal_models_of_their_steps(
    tmp_path: Path, each_step: JobSpec, placement: Placement
) -> None:
    best, last = expected_best(each_step)
    assert 1 < best < last < TOTAL_STEPS
    spec = job(tmp_path, keep_best=True, early_stopping=EarlyStopping(patience=2), placement=placement)
    outcome = run_attempt(spec)
    assert outcome is not None
    assert (outcome["status"], outcome["total_steps"]) == ("succeeded", last)
    assert folders_of(spec) == ["out", f"out-step-{best}"]
    each = Path(each_step.output_dir)
    assert_same(params_of(Path(f"{spec.output_dir}-step-{best}")), params_of(Path(f"{each}-step-{best}")))
    assert_same(exported_params(spec), params_of(Path(f"{each}-step-{last}")))
    assert leftovers_of(spec) == []
    told = [record.data for record in journal_of(spec) if record.kind == "checkpoint"]
    assert told[-1]["nbytes"] == folder_nbytes(Path(spec.output_dir)) > 0


@pytest.mark.short("mixed-before the last export")
@pytest.mark.parametrize(
    ("placement", "where"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (i % 4 != 0), id=f"{name}-{case[1]}")
        for start, (name, placement) in enumerate((("ssd", Placement()), ("mixed", MIXED)))
        for i, case in enumerate(product([placement], WHERE), start=start)
    ],
)
def test_whatever_cuts_an_attempt_off_the_job_ends_at_the_same_step_with_the_same_model(
    tmp_path: Path, each_step: JobSpec, placement: Placement, where: str
) -> None:
    best, last = expected_best(each_step)
    kind, step = {
        "before the decision": (ComputeBlocks, best),
        "before the export": (ExportModel, best),
        "after it": (UpdateStep, best + 1),
        "before the last export": (ExportModel, last),
    }[where]

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, ComputeBlocks):
            is_due = any((each.phase, each.step) == (Phase.EVALUATE_HEAD, step) for each in message.operations)
        else:
            is_due = message.step == step
        if isinstance(message, kind) and is_due:
            raise CutOff

    spec = job(tmp_path, placement=placement, **OPTIONS)
    with pytest.raises(CutOff):
        run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path), on_message=look)
    outcome = run_attempt(spec, 2)
    assert outcome is not None
    assert (outcome["status"], outcome["total_steps"]) == ("succeeded", last)
    assert folders_of(spec) == ["out", f"out-step-{best}"]
    assert_same(exported_params(spec), params_of(Path(f"{each_step.output_dir}-step-{best}")))
    assert leftovers_of(spec) == []


def test_without_ssds_the_best_is_kept_too(tmp_path: Path, each_step: JobSpec) -> None:
    best, last = expected_best(each_step)
    spec = job(tmp_path, placement=HOST, num_ssds=0, **OPTIONS)
    outcome = run_attempt(spec)
    assert outcome is not None
    assert (outcome["status"], outcome["total_steps"]) == ("succeeded", last)
    assert_same(exported_params(spec), params_of(Path(f"{each_step.output_dir}-step-{best}")))


@pytest.mark.long
def test_steps_whose_evaluation_decides_are_committed(tmp_path: Path) -> None:
    spec = job(tmp_path, placement=HOST, keep_best=True, evaluate_every=3, total_steps=7)
    committed: list[int] = []

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, CommitStore) and message.step not in committed:
            committed.append(message.step)

    run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path), on_message=look)
    assert committed == [0, 3, 6, 7]
