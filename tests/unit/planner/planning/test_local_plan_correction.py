"""A real job whose machine profile is wrong: its plan changes after the first steps, and its losses do not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.scheduler.throttle import Throttle
from tests.support.cut_off import CutOff
from tests.support.reference_loop import train_plainly
from tests.support.training import (
    VOCABULARY,
    exported_params,
    has_direct_io,
    journal_of,
    leftovers_of,
    losses_of,
    make_spec,
)
from windlass.actors.job.spec import JobSpec
from windlass.actors.lifecycle.stop_request import StopRequest
from windlass.actors.messages import ComputeBlocks, Message, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.scheduler.scheduler import PAUSED
from windlass.actors.timeline.span_files import FOLDER
from windlass.engine.model.partition import Partition, build_meta_model, load_config
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds
from windlass.planner.planning.job_planning import plan_job
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import PlanRequest, ReplanRequest
from windlass.storage.ids import ActorName, Attempt

NUM_STEPS, NUM_MEASURED = 12, 6
# Declared rates, per second, so that other load on this machine does not matter. The profile has the right compute
# rate, and 100 times the real SSD rate.
SSD_BYTES, FLOP = 3e7, 5e10
BUDGET_NBYTES = 32 << 20


def job(root: Path, **changes: Any) -> JobSpec:
    """A job with a model that is large enough for its bytes to count."""
    changes = {"total_steps": NUM_STEPS, "num_microbatches": 2, "num_ssds": 1, "evaluate_every": 4, **changes}
    spec = make_spec(root, **changes)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(spec.model_dir)
    Path(spec.layout_file).write_text(partition_of(spec).layout.to_json())
    return spec


def partition_of(spec: JobSpec) -> Partition:
    """The partition with the product's chunk size, which is larger than that of tests."""
    return Partition(build_meta_model(load_config(spec.model_dir), spec.training.precision))


def request(
    spec: JobSpec, running: ReplanRequest | None = None, *, host_memory_nbytes: int = BUDGET_NBYTES
) -> PlanRequest:
    ssd_gb_per_s = 100 * SSD_BYTES / 1e9
    return PlanRequest(
        model_dir=Path(spec.model_dir),
        hardware=Hardware(
            gpus=Gpus(count=0, memory_gib=4, tflops=FLOP / 1e12),
            host=Host(memory_gib=4, memory_gb_per_s=10, adam_params_per_s=3e8),
            pcie=Pcie(h2d_gb_per_s=5, d2h_gb_per_s=5),
            ssds=Ssds(count=1, read_gb_per_s=ssd_gb_per_s, write_gb_per_s=ssd_gb_per_s, capacity_gib=10),
        ),
        training=spec.training,
        num_validation_examples=spec.num_validation_examples,
        num_optimizers=1,
        host_memory_nbytes=host_memory_nbytes,
        device_memory_nbytes=None,
        running=running,
    )


def by_plan(spec: JobSpec, attempt: int, found: JobPlan) -> JobSpec:
    assert found.placement is not None
    return dataclasses.replace(
        spec,
        attempt=Attempt(attempt),
        placement=found.placement,
        host_memory_nbytes=found.arena_nbytes,
    )


def run(spec: JobSpec, *, pause_in: int | None = None, cut_off_in: int | None = None) -> dict[str, Any] | None:
    """Runs an attempt, paused in a step or cut off in the updates of one. Returns its outcome, if it has one."""
    stop = StopRequest()

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, ComputeBlocks) and any(each.step == pause_in for each in message.operations):
            stop.pause()
        if isinstance(message, UpdateStep) and message.step == cut_off_in:
            raise CutOff

    try:
        return run_local(
            spec,
            partition=partition_of(spec),
            direct=has_direct_io(Path(spec.model_dir)),
            on_message=look,
            stop=stop,
        )
    except CutOff:
        return None


@pytest.mark.timeout(600)
# test_local_resume.py also tests attempts that nothing cuts off.
@pytest.mark.long
@pytest.mark.parametrize("cut_off_in", [None, NUM_MEASURED + 2])
def test_the_plan_changes_after_the_first_steps_and_the_losses_do_not(tmp_path: Path, cut_off_in: int | None) -> None:
    spec = job(tmp_path)
    first = plan_job(request(spec), tmp_path)
    with Throttle(ssd_bytes_per_s=SSD_BYTES, compute_flop_per_s=FLOP).holding_back():
        paused = run(by_plan(spec, 1, first), pause_in=NUM_MEASURED)
    assert paused is not None
    assert paused["status"] == PAUSED
    running = ReplanRequest(
        timeline_dir=Path(spec.job_dir) / FOLDER,
        first_step=3,
        plan=first,
        num_steps_left=1000,
        restart_s=1.0,
    )
    second = plan_job(request(spec, running), tmp_path)
    assert second.message is not None
    assert "each SSD reads" in second.message
    assert "the profile said 3 GB/s" in second.message
    assert second.changes, second.message
    assert second.placement != first.placement
    if cut_off_in is not None:
        assert run(by_plan(spec, 2, second), cut_off_in=cut_off_in) is None
    outcome = run(by_plan(spec, 3, second))
    assert outcome is not None
    assert outcome["status"] == "succeeded"

    (tmp_path / "undisturbed").mkdir()
    undisturbed = job(tmp_path / "undisturbed")
    assert run(undisturbed) is not None
    losses = losses_of(undisturbed)
    # With states resident in memory, steps that were not committed are trained and reported again.
    told = [(each.data["step"], each.data["train_loss"]) for each in journal_of(spec) if "train_loss" in each.data]
    assert set(told) == set(enumerate(losses, start=1))
    assert cut_off_in is not None or len(told) == NUM_STEPS
    for name, param in exported_params(undisturbed).items():
        assert torch.equal(exported_params(spec)[name], param), name
    plain = train_plainly(spec)
    assert losses == pytest.approx(plain.losses, rel=1e-4)
    assert leftovers_of(spec) == []
