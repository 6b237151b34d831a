"""Jobs over several boxes: the request for a plan, the kept plan, and the specification of each box's part."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.whole_jobs import Run
from tests.support.service.cluster_stage import LAYOUT
from tests.support.service.prepared_jobs import MACHINE, RESULTS, job_of, windlass_settings
from tests.support.training import has_direct_io, keep_calibration, leftovers_of, make_spec
from tests.unit.planner.stages.test_stages_plan import FIRST, LAST, PLAN
from windlass.actors.job.context import make_context
from windlass.actors.job.pace import Pace
from windlass.actors.job.spec import JobCore, JobSpec
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.runtime.moving.linked_move import _of_link
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.model.partition import partition_folder
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.stages.job_stages import plan_stages
from windlass.planner.stages.stages_plan import StagePlan, StagesPlan
from windlass.planner.stages.stages_request import PairRate
from windlass.service.installation.settings import Settings
from windlass.service.jobs.box_plans import BoxKind
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.plan_files import expected_pace, keep_plan_request, load_plan, load_plan_request, plans_of
from windlass.service.jobs.plan_view import predicted_of
from windlass.service.jobs.spec_builder import build_job_spec, job_dir, resolve_job
from windlass.service.jobs.stage_plans import (
    STAGES_FILE,
    build_move_spec,
    build_stage_spec,
    division_of,
    fields_of_stages,
    fields_on_one_box,
    keep_stages,
    layout_epoch_on_one_box,
    stages_of,
    stages_of_answer,
    stages_request,
)
from windlass.service.preparation.steps import PREPARE_DATA
from windlass.storage.ids import Kernel
from windlass.storage.sql.models import Job, JobMetrics

HEAD_RESOURCES = MachineResources(num_cores=4, num_gpus=2)
KIND = BoxKind(resources=HEAD_RESOURCES, hardware=MACHINE)
RATE = PairRate(source="head", target="attic", bytes_per_s=1.25e9)
# Of a job with two GPUs and eight micro-batches. One box was measured, and the other one was not.
UNPLANNED = replace(
    PLAN,
    stages=(
        FIRST,
        StagePlan(
            box="attic",
            first_block=3,
            stop_block=6,
            placement=Placement(group_size=2),
            num_optimizers=3,
            host_memory_nbytes=5 * 2**30,
            peak_gib={},
        ),
    ),
)
PLANS = [pytest.param(PLAN, id="with plans"), pytest.param(UNPLANNED, id="without a plan of one box")]


def home_of(path: Path, **settings: Any) -> Settings:
    return Settings(home=path, **({"num_cpu_optimizers": 1} | settings))


def prepared(settings: Settings, **asked: Any) -> Job:
    """A job whose data is prepared in this home."""
    job = job_of(windlass_settings(**({"gpus": 2, "batch_size": 16, "num_microbatches": 8} | asked)))
    resolved = resolve_job(job, RESULTS, num_devices=2)
    job.hyperparameters, job.total_steps = json.loads(json.dumps(resolved.hyperparameters)), resolved.total_steps
    folder = job_dir(settings, job.id) / "prepare"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{PREPARE_DATA}.json").write_text(json.dumps(RESULTS[PREPARE_DATA]))
    (folder.parent / "layout.json").write_text(json.dumps({"is_divisible": True}))
    return job


def core_of(spec: JobSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(JobCore)}


@pytest.mark.parametrize("plan", PLANS)
def test_head_derives_for_each_box_what_the_box_derives_for_itself(tmp_path: Path, plan: StagesPlan) -> None:
    head = home_of(tmp_path / "head", host_memory_gib=3.0)
    attic = home_of(
        tmp_path / "attic",
        ssd_dirs=(tmp_path / "other",),
        models_dir=tmp_path / "elsewhere",
        num_cpu_optimizers=2,
        host_memory_gib=9.0,
        gpu_memory_gib=1.0,
        compute_threads=1,
    )
    budgets = {"budgets": {"host_memory_gib": 8.0}}
    jobs = [prepared(home, **budgets) for home in (head, attic)]
    resources = MachineResources(num_cores=16, num_gpus=8)
    for index in range(2):
        by_head = build_stage_spec(head, HEAD_RESOURCES, jobs[0], plan, index)
        by_box = build_stage_spec(attic, resources, jobs[1], plan, index)
        assert core_of(by_head) == core_of(by_box)
        assert by_box.ssd_dirs == (str(tmp_path / "other"),)
        assert by_box.job_dir == str(job_dir(attic, jobs[1].id))
        assert (by_head.device_memory_nbytes, by_box.device_memory_nbytes) == (None, 2**30)


@pytest.mark.parametrize("plan", PLANS)
def test_specification_of_a_box_has_the_plan_s_values(tmp_path: Path, plan: StagesPlan) -> None:
    settings = home_of(tmp_path, host_memory_gib=1.0)
    job = prepared(settings)
    for index, stage in enumerate(plan.stages):
        spec = build_stage_spec(settings, HEAD_RESOURCES, job, plan, index)
        assert (spec.box, spec.stages) == (index, plan.engine_stages)
        assert spec.names_of_boxes == tuple(each.box for each in plan.stages)
        assert (spec.placement, spec.num_cpu_optimizers) == (stage.placement, stage.num_optimizers)
        assert spec.host_memory_nbytes == (stage.arena_nbytes or stage.host_memory_nbytes)
        assert spec.planned_device_nbytes == stage.planned_device_nbytes
        assert spec.training.update_order is UpdateOrder.KEPT
        assert (spec.num_ranks, spec.training.num_microbatches) == (2, 8)
        assert spec.expected_pace == Pace(step_s=1.25, is_measured=False)
    measured = Pace(step_s=9.0, is_measured=True)
    assert build_stage_spec(settings, HEAD_RESOURCES, job, plan, 0, measured).expected_pace == measured


def test_specification_takes_the_order_of_updates_from_the_plan(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings, clip_norm=None)
    active = replace(PLAN, update_order=UpdateOrder.ACTIVE)
    orders = [build_stage_spec(settings, HEAD_RESOURCES, job, plan, 0).training.update_order for plan in (PLAN, active)]
    assert orders == [UpdateOrder.KEPT, UpdateOrder.ACTIVE]


@pytest.mark.parametrize("asked", [{"num_microbatches": 4}, {"gpus": 1}])
def test_plan_for_other_numbers_than_those_of_the_row_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings, **asked)
    with pytest.raises(ValueError, match="make the plan again"):
        build_stage_spec(settings, HEAD_RESOURCES, job, PLAN, 0)


def test_row_gets_the_plan_s_numbers_before_the_first_attempt_only(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings, gpus="auto", num_microbatches=None)
    before = dict(job.hyperparameters or {})
    changed = fields_of_stages(job, PLAN)["hyperparameters"]
    assert changed == {**before, "num_microbatches": 8, "cut_matrices": None, "gpus": 2}
    assert job.hyperparameters == before, "the caller writes the row"
    job.hyperparameters = changed
    assert fields_of_stages(job, PLAN)["hyperparameters"] == changed
    assert build_stage_spec(settings, HEAD_RESOURCES, job, PLAN, 1).training.num_microbatches == 8
    job.attempt = 1
    assert fields_of_stages(job, PLAN)["hyperparameters"] == changed
    with pytest.raises(ValueError, match=r"begun with num_microbatches 8, .* and the plan has 16"):
        fields_of_stages(job, replace(PLAN, num_microbatches=16))
    with pytest.raises(ValueError, match=rf"begun with cut_matrices None, .* and the plan has {2**24}"):
        fields_of_stages(job, replace(PLAN, cut_matrices=2**24))


def test_all_boxes_of_a_job_have_the_cut_of_its_plan(tmp_path: Path) -> None:
    settings, cut = home_of(tmp_path), replace(PLAN, cut_matrices=2**24)
    job = prepared(settings)
    with pytest.raises(ValueError, match=rf"cut_matrices None, and its plan over several boxes is for {2**24}"):
        build_stage_spec(settings, HEAD_RESOURCES, job, cut, 0)
    job.hyperparameters = fields_of_stages(job, cut)["hyperparameters"]
    specs = [build_stage_spec(settings, HEAD_RESOURCES, job, cut, box) for box in (0, 1)]
    assert [spec.training.cut_matrices for spec in specs] == [2**24, 2**24]
    with pytest.raises(ValueError, match="make the plan again"):
        build_stage_spec(settings, HEAD_RESOURCES, job, PLAN, 0)


def test_row_of_a_job_with_a_fixed_number_of_gpus_gets_none(tmp_path: Path) -> None:
    job = prepared(home_of(tmp_path))
    assert fields_of_stages(job, PLAN)["hyperparameters"] == job.hyperparameters


def test_request_has_the_bounds_of_each_box_and_those_of_the_job(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings, budgets={"host_memory_gib": 4.0})
    other = BoxKind(
        resources=MachineResources(num_cores=8, num_gpus=4),
        hardware=None,
        num_optimizers=2,
        host_memory_gib=3.0,
        gpu_memory_gib=2.0,
    )
    request = stages_request(settings, job, [("head", KIND, 5 * 2**30), ("attic", other, None)], 2, (RATE,))
    assert [(box.name, box.ssd_nbytes) for box in request.boxes] == [("head", 5 * 2**30), ("attic", None)]
    assert request.num_boxes == 2
    first, second = request.boxes
    assert (first.hardware, first.host_memory_nbytes, first.device_memory_nbytes) == (MACHINE, 4 * 2**30, None)
    assert (second.hardware, second.num_optimizers) == (None, 2)
    assert (second.host_memory_nbytes, second.device_memory_nbytes) == (3 * 2**30, 2 * 2**30)
    assert (request.num_ranks, request.chooses_ranks, request.chooses_microbatches) == (2, False, False)
    assert request.training.num_microbatches == 8
    assert request.num_validation_examples == RESULTS[PREPARE_DATA]["num_validation_examples"]
    assert request.layout_file == job_dir(settings, job.id) / "layout.json"
    assert request.dataset_dir == job_dir(settings, job.id) / "dataset"
    assert request.rates == (RATE,)


def test_request_leaves_to_the_plan_what_the_settings_leave_open_until_the_job_begins(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings, gpus="auto", num_microbatches=None)
    three = replace(KIND, resources=MachineResources(num_cores=8, num_gpus=3))
    boxes = [("head", three, None), ("attic", KIND, None)]
    request = stages_request(settings, job, boxes, 2)
    assert (request.chooses_microbatches, request.chooses_ranks, request.num_ranks) == (True, True, 3)
    assert [box.num_ranks for box in request.boxes] == [None, 2], "each box has as many as it has room for"
    assert request.chooses_cut
    layout = job_dir(settings, job.id) / "layout.json"
    layout.write_text("{}")
    assert not stages_request(settings, job, boxes, 2).chooses_cut, "an earlier version has prepared the job"
    job.attempt = 1
    assert not stages_request(settings, job, boxes, 2).chooses_microbatches
    again = stages_request(settings, job, boxes, 2, before=PLAN)
    assert (again.num_ranks, [box.num_ranks for box in again.boxes]) == (2, [None, None])


@pytest.mark.parametrize("gpus", [2, 1, "auto"])
def test_request_for_a_job_of_an_older_release_keeps_the_lanes_that_auto_was_then(
    tmp_path: Path, gpus: int | str
) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings, num_microbatches=None, gpus=gpus)
    assert job.windlass["lanes"] == "auto"
    job.hyperparameters = {**(job.hyperparameters or {}), "lanes": 2, "num_microbatches": 4}
    job.attempt = 1
    request = stages_request(settings, job, [("head", KIND, None), ("attic", KIND, None)], 2)
    assert (request.training.lanes, request.training.num_microbatches) == (2, 4)
    assert not request.chooses_microbatches


def test_part_has_the_gpus_of_its_box(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings, gpus="auto")
    plan = replace(PLAN, stages=(PLAN.stages[0], replace(PLAN.stages[1], num_ranks=1)))
    job.hyperparameters = fields_of_stages(job, plan)["hyperparameters"]
    first, second = (build_stage_spec(settings, HEAD_RESOURCES, job, plan, index) for index in range(2))
    assert (first.num_ranks, second.num_ranks) == (2, 1)
    assert first.ranks == second.ranks == (2, 1)
    after = replace(plan, layout_epoch=1)
    move = build_move_spec(settings, HEAD_RESOURCES, job, (plan, after), [stage.box for stage in plan.stages], 1)
    assert _of_link(move).box == 1, "boxes that move states need no numbers of GPUs"


def test_box_with_too_few_gpus_is_named(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings)
    one = replace(KIND, resources=MachineResources(num_cores=8, num_gpus=1))
    with pytest.raises(ValueError, match=r"box attic: windlass\.gpus is 2, and the machine has 1 GPU"):
        stages_request(settings, job, [("head", KIND, None), ("attic", one, None)], 2)


def test_kind_of_a_home_has_the_settings_that_plans_follow_from(tmp_path: Path) -> None:
    settings = home_of(tmp_path, num_cpu_optimizers=2, host_memory_gib=3.0, gpu_memory_gib=2.0)
    kind = BoxKind.of_home(settings, HEAD_RESOURCES, MACHINE)
    same = BoxKind(
        resources=HEAD_RESOURCES, hardware=MACHINE, num_optimizers=2, host_memory_gib=3.0, gpu_memory_gib=2.0
    )
    assert kind == same


def test_plan_is_kept_and_an_unreadable_one_counts_as_missing(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = prepared(settings)
    assert stages_of(settings, job.id) is None
    keep_stages(settings, job.id, PLAN)
    assert stages_of(settings, job.id) == PLAN
    keep_stages(settings, job.id, UNPLANNED)
    assert stages_of(settings, job.id) == UNPLANNED
    path = job_dir(settings, job.id) / STAGES_FILE
    for text in ("[", "[]", "{}", json.dumps({**PLAN.to_json(), "extra": 1})):
        path.write_text(text)
        assert stages_of(settings, job.id) is None


# --- a job on one box -------------------------------------------------------------------------------------------------

ONE_BOX = replace(
    PLAN,
    stages=(
        replace(
            FIRST,
            stop_block=4,
            placement=Placement(group_size=2),
            peak_gib={"gpu": 1.5, "host": 2, "ssd": 3},
            busy_s={"compute": 0.75},
            choices={"kept_grads_on_ssd": 3, "num_microbatches": 8},
        ),
    ),
    layout_epoch=2,
    from_attempt=5,
)


def begun(settings: Settings, **asked: Any) -> Job:
    """A job that has begun on one box."""
    job = prepared(settings, **asked)
    (job_dir(settings, job.id) / "layout.json").write_text(LAYOUT.to_json())
    job.attempt, job.plan_number = 4, 0
    return job


def test_job_that_has_begun_on_one_box_is_one_stage_of_the_head(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = begun(settings)
    division = division_of(settings, job)
    assert division is not None
    assert (division.boxes, [tuple(stage) for stage in division.engine_stages]) == (("head",), [(0, 4)])
    assert (division.num_ranks, division.num_microbatches, division.layout_epoch) == (2, 8, 0)
    assert layout_epoch_on_one_box(settings, job.id) == 0
    job.attempt = 0
    assert division_of(settings, job) is None


def test_job_that_has_moved_to_one_box_is_in_the_epoch_of_that_move(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = begun(settings, gpus=1)
    keep_stages(settings, job.id, ONE_BOX)
    division = division_of(settings, job)
    assert division is not None
    assert (division.layout_epoch, division.from_attempt, division.num_ranks) == (2, 5, 1)
    assert layout_epoch_on_one_box(settings, job.id) == 2


def test_job_over_several_boxes_is_in_the_stored_division(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = begun(settings)
    keep_stages(settings, job.id, PLAN)
    assert division_of(settings, job) == PLAN
    with pytest.raises(ValueError, match="its states are on the boxes head, attic"):
        layout_epoch_on_one_box(settings, job.id)
    (job_dir(settings, job.id) / STAGES_FILE).write_text("{}")
    assert division_of(settings, job) is None, "it may be over several boxes"


def test_job_that_comes_to_one_box_has_its_stage_as_its_plan(tmp_path: Path) -> None:
    settings = home_of(tmp_path)
    job = begun(settings)
    job.windlass = {**job.windlass, "boxes": 1}
    assert plans_of(settings, job) == []
    fields = fields_on_one_box(settings, job, ONE_BOX)
    assert (fields["plan_number"], fields["windlass"]["boxes"]) == (1, None)
    job.plan_number, job.windlass = fields["plan_number"], fields["windlass"]
    plan = load_plan(settings, job)
    assert plan is not None
    assert (plan.num_gpus, plan.num_microbatches, plan.update_order) == (2, 8, UpdateOrder.KEPT)
    assert (plan.arena_nbytes, plan.planned_device_nbytes, plan.from_attempt) == (1000, 2000, 5)
    assert predicted_of(plan) == {
        "step_s": 1.25,
        "step_s_low": None,
        "step_s_high": None,
        "peak_gib": {"gpu": 2000 / 2**30, "host": 1000 / 2**30, "ssd": 3},
    }
    assert plan.report.busy_s == {"compute": 0.75}, "its plan can be corrected by measured steps"
    assert plan.report.choices is not None
    assert plan.report.choices["kept_grads_on_ssd"] == 3
    step = JobMetrics(job_id=job.id, step=2, attempt=4, created_at=0.0, data={"remaining_s": 9.0, "total_steps": 4})
    assert expected_pace(plan, None, step) == Pace(step_s=1.25, is_measured=False), "that step was on several boxes"
    moved = replace(ONE_BOX, from_attempt=5)
    earlier = plan.model_copy(update={"from_attempt": None})
    assert expected_pace(None, moved, step) == Pace(step_s=1.25, is_measured=False)
    assert expected_pace(earlier, moved, step) == Pace(step_s=1.25, is_measured=False), "the plan is for one box"
    assert expected_pace(None, replace(moved, step_s=None), step) is None, "nothing is known of the pace there"
    assert load_plan_request(settings, job) is None
    request = stages_request(settings, job, [("head", KIND, None)], 1, (), ONE_BOX)
    for number in (1, 2):
        asked = replace(request, num_ranks=number)
        keep_plan_request(settings, job, asked.on(asked.boxes[0], MACHINE))
    kept = load_plan_request(settings, job)
    assert kept is not None
    assert (kept.num_ranks, kept.hardware) == (1, MACHINE), "the first one stays"
    without = replace(ONE_BOX, stages=(replace(ONE_BOX.stages[0], arena_nbytes=None),))
    assert "plan_number" not in fields_on_one_box(settings, job, without), "it goes on by the plan that it had"


def test_answer_of_the_planner_has_the_plan() -> None:
    assert stages_of_answer({"ok": True, "stages": json.loads(json.dumps(PLAN.to_json()))}) == PLAN
    with pytest.raises(ValueError):
        stages_of_answer({"ok": True, "warnings": ["no plan was made"]})
    assert LAST.arena_nbytes is None


# --- a job that runs --------------------------------------------------------------------------------------------------


def cpu_machine() -> Hardware:
    return MACHINE.model_copy(update={"gpus": MACHINE.gpus.model_copy(update={"count": 0, "tflops": 0.1})})


def run_with(specs: list[JobSpec]) -> Run:
    first, *others = specs
    for spec in specs:
        Path(spec.arena_dir).mkdir(exist_ok=True)
        for ssd_dir in map(Path, spec.ssd_dirs):
            keep_calibration(ssd_dir)
    outcome = run_local(first, other_boxes=others, poison_released=True, direct=has_direct_io(Path(first.model_dir)))
    assert outcome["status"] == "succeeded", outcome
    assert [leftovers_of(spec) for spec in specs] == [[]] * len(specs)
    return Run.of(first)


def filled_home(path: Path, made: JobSpec, job: Job, num_cpu_optimizers: int) -> Settings:
    """A home with the job's model and its prepared data."""
    settings = home_of(path, num_cpu_optimizers=num_cpu_optimizers)
    shutil.copytree(made.model_dir, settings.models_dir / job.model)
    folder = job_dir(settings, job.id)
    shutil.copytree(made.dataset_dir, folder / "dataset")
    layout = partition_folder(made.model_dir, made.training.precision).layout
    (folder / "layout.json").write_text(layout.to_json())
    (folder / "prepare").mkdir()
    data = {"num_validation_examples": made.num_validation_examples}
    (folder / "prepare" / f"{PREPARE_DATA}.json").write_text(json.dumps(data))
    return settings


@pytest.mark.long
@pytest.mark.parametrize("is_measured", [True, False])
def test_job_over_two_homes_has_the_bits_of_one_box(tmp_path: Path, *, is_measured: bool) -> None:
    made = make_spec(tmp_path / "made", num_microbatches=4, total_steps=6, evaluate_every=3, clip_norm=0.5)
    job = job_of(windlass_settings(precision="fp32", sequence_length=48, num_microbatches=None))
    job.id = f"ftjob-{made.job.removeprefix('ftjob-')}"
    training = replace(made.training, kernel=Kernel.FUSED)
    results = {**RESULTS, PREPARE_DATA: {**RESULTS[PREPARE_DATA], "num_examples": 18}}
    resolved = replace(resolve_job(job, results), training=training)
    job.hyperparameters, job.total_steps = json.loads(json.dumps(resolved.hyperparameters)), training.total_steps
    job.windlass = {**job.windlass, "evaluate_every": 3}
    head, attic = (filled_home(tmp_path / name, made, job, number) for name, number in (("head", 1), ("attic", 2)))

    resources = MachineResources(num_cores=2, num_gpus=0)
    kinds = [
        (name, BoxKind.of_home(settings, resources, cpu_machine() if is_measured else None), None)
        for name, settings in (("head", head), ("attic", attic))
    ]
    plan = plan_stages(stages_request(head, job, kinds, 2, (RATE,)))
    assert (plan.step_s is not None) == is_measured
    job.hyperparameters = fields_of_stages(job, plan)["hyperparameters"]
    job.attempt = 1
    keep_stages(head, job.id, plan)
    kept = stages_of(head, job.id)
    assert kept is not None

    specs = [build_stage_spec(settings, resources, job, kept, index) for index, settings in enumerate((head, attic))]
    layout = partition_folder(made.model_dir, made.training.precision).layout
    for spec, stage in zip(specs, kept.stages, strict=True):
        if is_measured:
            assert make_context(spec, layout, "").plan.arena_nbytes == stage.arena_nbytes
    arenas = [replace(spec, arena_dir=str(tmp_path / f"shm{spec.box}")) for spec in specs]
    together = run_with(arenas)

    alone = filled_home(tmp_path / "alone", made, job, 1)
    one = replace(build_job_spec(alone, resources, job), arena_dir=str(tmp_path / "shm"), host_memory_nbytes=2**28)
    together.assert_equals(run_with([one]))
