"""Real jobs with any gradient settings, run in this process by the plans made for them."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.training import has_direct_io, leftovers_of, losses_of, metrics_of
from tests.unit.planner.planning.test_local_plan_correction import by_plan, job, partition_of, request
from windlass.actors.messages import GradOffloaded, Message
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.planning.job_planning import plan_job
from windlass.storage.ids import ActorName, BlockIndex, Precision

# Bytes of the arena: so few that kept gradients spill to the SSDs in fp32, but not in bf16.
HOST_MEMORY_NBYTES = 15 << 20


@pytest.mark.parametrize(
    ("update_order", "accumulation_precision", "clip_norm", "num_spilled"),
    [
        (UpdateOrder.KEPT, Precision.BF16, None, 0),
        pytest.param(UpdateOrder.AFTER_BACKWARD, Precision.FP32, 1.0, 8, marks=pytest.mark.long),
        pytest.param(UpdateOrder.KEPT, Precision.FP32, None, 8, marks=pytest.mark.long),
        pytest.param(UpdateOrder.ACTIVE, Precision.BF16, None, 0, marks=pytest.mark.long),
        pytest.param(UpdateOrder.NAIVE, Precision.FP32, None, 0, marks=pytest.mark.long),
        pytest.param(None, Precision.BF16, 1.0, 0, marks=pytest.mark.long),
    ],
)
def test_planned_job_with_any_gradient_settings_spills_the_gradients_that_were_planned(
    tmp_path: Path,
    update_order: UpdateOrder | None,
    accumulation_precision: Precision,
    clip_norm: float | None,
    num_spilled: int,
) -> None:
    spec = job(
        tmp_path,
        total_steps=2,
        precision=Precision.BF16,
        update_order=update_order,
        accumulation_precision=accumulation_precision,
        clip_norm=clip_norm,
    )
    asked = request(spec, host_memory_nbytes=HOST_MEMORY_NBYTES)
    # SSDs so slow that spilling takes time, which is else hidden behind the calls of small layers' operators.
    ssds = with_part(asked.hardware.ssds, read_gb_per_s=0.05, write_gb_per_s=0.05)
    found = plan_job(replace(asked, hardware=with_part(asked.hardware, ssds=ssds)), tmp_path)
    assert found.report.feasible, found.report.reasons
    assert found.arena_nbytes is not None
    assert found.arena_nbytes <= HOST_MEMORY_NBYTES
    spilled: set[BlockIndex] = set()

    def look(_: ActorName, message: Message) -> None:
        if isinstance(message, GradOffloaded) and any(chunk.span is None for chunk in message.chunks):
            spilled.add(message.block)

    planned = by_plan(spec, 1, found)
    direct = has_direct_io(Path(spec.model_dir))
    outcome = run_local(planned, partition=partition_of(spec), direct=direct, on_message=look)
    assert outcome["status"] == "succeeded"
    assert found.report.choices is not None
    assert len(spilled) == found.report.choices["kept_grads_on_ssd"] == num_spilled
    assert leftovers_of(spec) == []


@pytest.mark.long
def test_planned_job_with_lanes_has_the_bits_of_one_without_a_plan(tmp_path: Path) -> None:
    changes = {"total_steps": 2, "precision": Precision.BF16, "clip_norm": 1.0, "lanes": 2}
    spec, unplanned = (job(tmp_path / name, **changes) for name in ("planned", "unplanned"))
    found = plan_job(request(spec, host_memory_nbytes=2 * HOST_MEMORY_NBYTES), tmp_path)
    assert found.report.feasible, found.report.reasons
    planned = by_plan(spec, 1, found)
    assert planned.placement != unplanned.placement
    for each in (planned, unplanned):
        outcome = run_local(each, partition=partition_of(each), direct=has_direct_io(Path(spec.model_dir)))
        assert outcome["status"] == "succeeded", outcome
    assert losses_of(planned) == losses_of(unplanned)
    assert list(metrics_of(planned, "grad_norm").values()) == list(metrics_of(unplanned, "grad_norm").values())
