"""All actors in one process: thirty steps agree with plain PyTorch."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.reference_loop import evaluate, train_plainly
from tests.support.training import (
    exported_params,
    has_direct_io,
    journal_of,
    leftovers_of,
    losses_of,
    make_partition,
    make_spec,
    metrics_of,
)
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import Precision

LOSS_TOLERANCE = {Precision.FP32: 1e-5, Precision.BF16: 1e-3}
RECOMPUTE, INPUTS, KEEP, SWAP = ActivationChoice
# Both values of most factors occur in one of these. `test_parity_matrix` has the others for fewer steps, and
# `make test-long` runs all.
QUICK = {(Precision.FP32, 4, True, 0.5, RECOMPUTE), (Precision.BF16, 1, False, None, SWAP)}


def matrix() -> list[Any]:
    return [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.long])
        for case in product(LOSS_TOLERANCE, (1, 4), (False, True), (None, 0.5), ActivationChoice)
    ]


@pytest.mark.short("fp32-4-True-0.5-recompute")
@pytest.mark.usefixtures("small_activation_slots")
@pytest.mark.parametrize(("precision", "num_microbatches", "tied", "clip_norm", "activations"), matrix())
def test_thirty_steps_agree_with_plain_pytorch(
    tmp_path: Path,
    precision: Precision,
    num_microbatches: int,
    tied: bool,
    clip_norm: float | None,
    activations: ActivationChoice,
) -> None:
    placement = Placement(activations=activations.of_layers(3), host_activation_nbytes=8 << 20)
    spec = make_spec(
        tmp_path,
        tied=tied,
        precision=precision,
        num_microbatches=num_microbatches,
        clip_norm=clip_norm,
        placement=placement,
    )
    outcome = run_local(spec, partition=make_partition(spec), poison_released=True, direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded", outcome
    assert leftovers_of(spec) == []

    plain = train_plainly(spec)
    tolerance = LOSS_TOLERANCE[precision]
    losses = losses_of(spec)
    assert len(losses) == 30
    assert losses == pytest.approx(plain.losses, rel=tolerance)
    assert losses[-1] < 0.95 * losses[0]
    assert metrics_of(spec, "valid_loss") == pytest.approx(plain.validation_losses, rel=tolerance)
    assert list(plain.validation_losses) == [15, 30]
    if clip_norm is not None:
        assert min(plain.grad_norms) > clip_norm
        norms = list(metrics_of(spec, "grad_norm").values())
        assert norms == pytest.approx(plain.grad_norms, rel=100 * tolerance)

    assert_params_agree(exported_params(spec), plain.params, precision)


def assert_params_agree(
    params: dict[str, torch.Tensor], masters: dict[str, torch.Tensor], precision: Precision
) -> None:
    assert set(params) == set(masters)
    for name, param in params.items():
        if precision is Precision.FP32:
            torch.testing.assert_close(param, masters[name], rtol=1e-4, atol=2e-5)
        elif not name.endswith("k_proj.bias"):
            # Attention ignores a constant added to all keys, so the gradient of that bias is only rounding errors.
            # AdamW turns them into steps as large as the others'.
            torch.testing.assert_close(param, masters[name].bfloat16(), rtol=2**-7, atol=2e-3)


def test_evaluation_of_model_with_dropout_equals_plain_pytorch_and_leaves_no_trace(tmp_path: Path) -> None:
    """Dropout is off in evaluations, and on again in later steps."""
    options: dict[str, Any] = {"dropout": 0.5, "total_steps": 2, "num_microbatches": 2, "num_ssds": 1}
    spec = make_spec(tmp_path / "evaluated", evaluate_every=1, checkpoint_every=1, **options)
    other = make_spec(tmp_path / "not", evaluate_every=None, num_validation_examples=0, **options)
    for each in (spec, other):
        outcome = run_local(each, partition=make_partition(each), direct=has_direct_io(tmp_path))
        assert outcome["status"] == "succeeded", outcome
    batches = list(PreparedDataset.open(spec.dataset_dir, "validation").evaluation_batches(1))
    for step, folder in ((1, f"{spec.output_dir}-step-1"), (2, spec.output_dir)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert metrics_of(spec, "valid_loss")[step] == pytest.approx(evaluate(model, batches), rel=1e-5)
    assert losses_of(spec) == losses_of(other)
    params = exported_params(other)
    assert [name for name, param in exported_params(spec).items() if not torch.equal(param, params[name])] == []


def test_micro_batches_differ_in_their_targets(tmp_path: Path) -> None:
    """Otherwise a loss averaged over each micro-batch would pass for one averaged over the step."""
    spec = make_spec(tmp_path)
    dataset = PreparedDataset.open(spec.dataset_dir, "train")
    for step in range(5):
        counts = [microbatch.num_targets for microbatch in dataset.batch(step, 4, 4, spec.training.seed)]
        assert len(set(counts)) > 1
        assert len(counts) == (2 if step == 4 else 4)


def test_journal_and_checkpoints(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, total_steps=5, checkpoint_every=2, evaluate_every=None, num_microbatches=2)
    outcome = run_local(spec, direct=has_direct_io(tmp_path))
    records = journal_of(spec)
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    checkpoints = [record.data for record in records if record.kind == "checkpoint"]
    assert [each["step_number"] for each in checkpoints] == [2, 4, 5]
    folders = [Path(each["path"]) for each in checkpoints]
    assert [folder.name for folder in folders] == ["out-step-2", "out-step-4", "out"]
    assert all((folder / "config.json").is_file() for folder in folders)
    assert list(metrics_of(spec, "valid_loss")) == [5]
    assert records[-1].kind == "outcome"
    dataset = PreparedDataset.open(spec.dataset_dir, "train")
    num_targets = sum(each.num_targets for step in range(5) for each in dataset.batch(step, 4, 2, 5))
    expected = {"status": "succeeded", "error": None, "trained_tokens": num_targets, "model_dir": spec.output_dir}
    assert records[-1].data == outcome == expected
