"""All actors in one process and no SSDs: all states are in host memory, and nothing is stored until the end."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cut_off import CutOff
from tests.support.training import exported_params, leftovers_of, losses_of, make_partition, make_spec, metrics_of
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import ComputeBlocks, Message, Phase, ReadChunks, WriteChunks
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.memory_plan.plan import Placement, PlanError
from windlass.engine.training_config.training_config import Initialization
from windlass.storage.ids import ActorName, Attempt, Precision, StatePrecision

NUM_BLOCKS = 5
IN_HOST_MEMORY = Placement(host_blocks=tuple(range(NUM_BLOCKS)))


def job(root: Path, **changes: Any) -> JobSpec:
    options = {"total_steps": 6, "evaluate_every": 3, "placement": IN_HOST_MEMORY, "num_ssds": 0}
    return make_spec(root, **(options | changes))


def run(spec: JobSpec, **options: Any) -> dict[str, Any]:
    return run_local(spec, partition=make_partition(spec), poison_released=True, **options)


@pytest.mark.short("active")
@pytest.mark.parametrize(
    "options",
    [
        {"num_cpu_optimizers": 2, "checkpoint_every": 4},
        {"precision": Precision.BF16, "state_precision": StatePrecision.SPLIT, "clip_norm": 0.5, "tied": True},
        {"precision": Precision.FP16, "num_microbatches": 2, "initialization": Initialization.RANDOM},
    ],
    ids=["active", "split-clipped", "fp16-random"],
)
def test_job_without_ssds_gives_the_model_of_a_job_with_ssds(tmp_path: Path, options: dict[str, Any]) -> None:
    moved: list[Message] = []

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, ReadChunks | WriteChunks):
            moved.append(message)

    spec = job(tmp_path / "without", **options)
    outcome = run(spec, on_message=look)
    assert outcome["status"] == "succeeded", outcome
    assert moved == []
    assert leftovers_of(spec) == []
    reference = job(tmp_path / "with", **options, num_ssds=2)
    assert run_local(reference, partition=make_partition(reference), direct=False)["status"] == "succeeded"
    assert losses_of(spec) == losses_of(reference)
    assert metrics_of(spec, "valid_loss") == metrics_of(reference, "valid_loss")
    expected = exported_params(reference)
    assert [name for name, param in exported_params(spec).items() if not torch.equal(param, expected[name])] == []
    if options.get("checkpoint_every"):
        assert Path(f"{spec.output_dir}-step-4").is_dir()


def test_a_lost_attempt_cannot_go_on_and_says_so(tmp_path: Path) -> None:
    def look(to: ActorName, message: Message) -> None:
        operations = message.operations if isinstance(message, ComputeBlocks) else ()
        if any((each.phase, each.step) == (Phase.HEAD, 3) for each in operations):
            raise CutOff

    spec = job(tmp_path / "job")
    with pytest.raises(CutOff):
        run(spec, on_message=look)
    outcome = run(dataclasses.replace(spec, attempt=Attempt(2)))
    assert outcome["status"] == "failed"
    assert "it has no SSDs, so nothing of it was kept; submit it again" in outcome["error"]["message"]


@pytest.mark.parametrize(
    "placement",
    [
        Placement(),
        Placement(host_blocks=(0, 1, 2), device_blocks=(3, 4)),
        dataclasses.replace(IN_HOST_MEMORY, ssd_activation_nbytes=1 << 20),
    ],
    ids=["on-ssds", "on-the-device", "activations"],
)
def test_placement_that_needs_ssds_is_refused(tmp_path: Path, placement: Placement) -> None:
    with pytest.raises(PlanError, match="the job has no SSDs"):
        run(job(tmp_path / "job", placement=placement))
