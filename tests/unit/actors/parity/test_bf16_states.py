"""States of 6 bytes a parameter train the demo's model about as well, and repeat exactly."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import exported_params, has_direct_io, losses_of, make_spec, metrics_of
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.checkpoint.check_model import check_model
from windlass.engine.data.tokenize import prepare
from windlass.service.demo.data import write_demo_files
from windlass.service.demo.model import make_demo_model
from windlass.storage.ids import Kernel, Precision, StatePrecision


def run(spec: JobSpec) -> JobSpec:
    outcome = run_local(spec, direct=has_direct_io(Path(spec.job_dir)))
    assert outcome["status"] == "succeeded", outcome
    return spec


def assert_same(first: JobSpec, second: JobSpec) -> None:
    assert losses_of(first) == losses_of(second)
    params, others = exported_params(first), exported_params(second)
    assert [name for name in params if not torch.equal(params[name], others[name])] == []


# The compiled kernel takes long to build.
@pytest.mark.long
@pytest.mark.parametrize("kernel", [Kernel.FUSED, pytest.param(Kernel.COMPILED, marks=pytest.mark.long)])
def test_a_seed_gives_the_same_model_twice(tmp_path: Path, kernel: Kernel, request: pytest.FixtureRequest) -> None:
    changes: dict[str, Any] = {"precision": Precision.BF16, "total_steps": 10, "evaluate_every": None}
    if kernel is Kernel.COMPILED:
        changes["kernel_dir"] = str(request.getfixturevalue("kernel_dir"))
    specs = [
        run(make_spec(tmp_path / name, state_precision=StatePrecision.BF16, kernel=kernel, **changes))
        for name in ("first", "second")
    ]
    assert_same(*specs)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_hundred_steps_of_the_demo_end_within_one_percent(tmp_path: Path) -> None:
    train, validation = tmp_path / "train.jsonl", tmp_path / "validation.jsonl"
    write_demo_files(train, validation, num_train=2400, num_validation=128)
    make_demo_model(tmp_path / "model", train)
    prepare(
        model_dir=tmp_path / "model",
        training_file=train,
        validation_file=validation,
        output_dir=tmp_path / "data",
        sequence_length=96,
    )
    check_model(tmp_path / "model", Precision.BF16, with_weights=True, layout_file=tmp_path / "layout.json")
    specs = []
    for name, states in (("fp32", StatePrecision.FP32), ("bf16", StatePrecision.BF16), ("again", StatePrecision.BF16)):
        spec = make_spec(
            tmp_path / name,
            epochs=1,
            batch_size=8,
            warmup_steps=20,
            sequence_length=96,
            clip_norm=1.0,
            precision=Precision.BF16,
            state_precision=states,
            total_steps=300,
            evaluate_every=None,
            compute_threads=2,
            num_validation_examples=128,
        )
        specs.append(
            run(
                dataclasses.replace(
                    spec,
                    model_dir=str(tmp_path / "model"),
                    dataset_dir=str(tmp_path / "data"),
                    layout_file=str(tmp_path / "layout.json"),
                )
            )
        )
    fp32, bf16, again = specs
    assert_same(bf16, again)
    last = [sum(losses_of(spec)[-30:]) / 30 for spec in (fp32, bf16)]
    assert last[0] < 0.75 * losses_of(fp32)[0]  # the loss has fallen
    assert last[1] == pytest.approx(last[0], rel=0.01)
    valid = [metrics_of(spec, "valid_loss")[300] for spec in (fp32, bf16)]
    print("\ntraining, validation loss with fp32 and bf16 states:", last, valid)
    assert valid[1] == pytest.approx(valid[0], rel=0.01)
