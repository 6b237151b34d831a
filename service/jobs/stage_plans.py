"""The plan of a job over its boxes, in the job's folder, and the specification of each box's part.

The first box is that of the head, which owns the job. All boxes read the same plan and the same row. So the head
derives for each box what that box derives for its own part.

A job on one box is one stage, and runs by the plan of a job on one box. It has a stored division only if its states
have moved once, or are to be moved.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.actors.job import JobSpec, Pace
from windlass.actors.runtime.moving import MoveSpec, progress_of_move
from windlass.actors.timeline import SIMULATED_FOLDER
from windlass.amounts import GIB, bytes_text
from windlass.engine.memory_plan import Placement
from windlass.engine.model import ModelLayout
from windlass.planner.question import JobPlan, PlanReport
from windlass.planner.stages import PairRate, RequestedBox, StagePlan, StagesPlan, StagesRequest
from windlass.service.installation import Settings, about
from windlass.service.jobs.box_plans import BoxKind
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.plan_files import keep_plan, load_plan_on_one_box
from windlass.service.jobs.spec_builder import (
    build_job_spec,
    chooses_gpus,
    dataset_dir,
    gpus_of,
    is_over_boxes,
    job_dir,
    layout_file,
    settings_of,
    training_config_of,
    with_gpus,
)
from windlass.service.preparation import PREPARE_DATA
from windlass.service.validation import count_text, model_dir
from windlass.storage.files import write_durably
from windlass.storage.ids import FIRST_EPOCH, HEAD_NAME, Attempt, BoxName, LayoutEpoch
from windlass.storage.sql import Job
from windlass.storage.sql.repositories import JobFields
from windlass.storage.store import DECISIONS_FILE, last_decision

_LOG = logging.getLogger(__name__)

STAGES_FILE = "prepare/stages.json"  # in a job's folder
_NEXT_FILE = "prepare/next-stages.json"  # there: the division to which the job's states are to be moved
_NEXT_SIMULATED = "next-simulated"  # in `prepare`: the simulated step of that division


def stages_request(
    settings: Settings,
    job: Job,
    boxes: Sequence[tuple[str, BoxKind, int | None]],
    num_boxes: int,
    rates: Sequence[PairRate] = (),
    before: StagesPlan | None = None,
) -> StagesRequest:
    """Makes the request for a prepared job over so many of these boxes, the first of which is the head's own.

    The plan may choose the number of micro-batches and the cut of matrices if the settings leave them open and the job
    has not begun. If it chooses GPUs, each box has as many as it has room for.
    `boxes`: each with its name, its kind, and the bytes that are free on its SSDs, None if they are not known.
    `rates`: of the network between the boxes, as far as they were measured. `before`: the job's division so far, from
    which a new one takes all on which the bits of its results depend.

    Raises:
        OSError, ValueError: the job's data is gone, or a box has too few GPUs.
    """
    folder, asked, training = job_dir(settings, job.id), settings_of(job).windlass, training_config_of(job)
    prepared = json.loads((folder / "prepare" / f"{PREPARE_DATA}.json").read_text())
    chooses_microbatches = asked.num_microbatches is None and not job.attempt
    most_microbatches = training.batch_size if chooses_microbatches else training.num_microbatches
    most_gpus = max(kind.resources.most_gpus for _, kind, _ in boxes)
    num_ranks = asked.with_most_gpus(most_gpus, most_microbatches).least_gpus
    if before is not None:
        num_ranks, training = before.num_ranks, replace(training, update_order=before.update_order)
    for name, kind, _ in boxes:
        if not chooses_gpus(job) and (why := kind.resources.why_too_many(num_ranks)) is not None:
            raise ValueError(f"box {name}: {why}")
    return StagesRequest(
        model_dir=model_dir(job.model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir),
        layout_file=layout_file(folder),
        dataset_dir=dataset_dir(folder),
        training=training,
        num_validation_examples=prepared["num_validation_examples"],
        chooses_microbatches=chooses_microbatches,
        chooses_cut=asked.cut_matrices == "auto" and not job.attempt and _notes_divisible(layout_file(folder)),
        chooses_order=asked.leaves_order_open and before is None,
        num_ranks=num_ranks,
        chooses_ranks=chooses_gpus(job) and before is None,
        boxes=tuple(_requested(*box, job, num_ranks) for box in boxes),
        num_boxes=num_boxes,
        rates=tuple(rates),
    )


def _notes_divisible(layout: Path) -> bool:
    """Returns whether a prepared layout says which matrices can be cut. Those of earlier versions do not."""
    return '"is_divisible"' in layout.read_text()


def _requested(name: str, kind: BoxKind, ssd_nbytes: int | None, job: Job, num_ranks: int) -> RequestedBox:
    most_gpus = kind.resources.most_gpus
    bounds = kind.bounds(settings_of(job).windlass)
    return RequestedBox(
        name=name,
        hardware=kind.hardware,
        num_optimizers=bounds.num_optimizers,
        host_memory_nbytes=bounds.host_memory_nbytes,
        device_memory_nbytes=bounds.device_memory_nbytes,
        ssd_nbytes=ssd_nbytes,
        num_ranks=most_gpus if most_gpus < num_ranks else None,
    )


def fields_of_stages(job: Job, plan: StagesPlan) -> JobFields:
    """Returns the fields of the row of a job that gets this plan, to be written before its first attempt.

    The row then has the plan's numbers of micro-batches and GPUs, and its cut of matrices. The first and the last one
    decide the last bits of the results.

    Raises:
        ValueError: the job has begun with another number of micro-batches, or another cut.
    """
    hyperparameters = with_gpus(job, plan.num_ranks) if chooses_gpus(job) else dict(job.hyperparameters or {})
    decided = {"num_microbatches": plan.num_microbatches, "cut_matrices": plan.cut_matrices}
    for name, value in decided.items():
        if job.attempt and hyperparameters.get(name) != value:
            raise ValueError(
                f"the job has begun with {name} {hyperparameters.get(name)}, on which its results depend, and the plan "
                f"has {value}: make the plan again"
            )
    return {"hyperparameters": hyperparameters | decided}


def fields_on_one_box(settings: Settings, job: Job, plan: StagesPlan) -> JobFields:
    """Returns the fields of the row of a job that is on one box from now on, by this plan of one stage.

    Its plan is stored as that of a job on one box. If it says nothing of memory, the job goes on by the plan that it
    had on one box, or without one. A job that never began might begin on any box, so it asks for the head's. Raises
    OSError.
    """
    assert not plan.is_over_several, f"it is over the boxes {', '.join(plan.boxes)}"
    fields: JobFields = {"windlass": {**job.windlass, "boxes": None, "box": None if job.attempt else HEAD_NAME}}
    stage = plan.stages[0]
    if stage.arena_nbytes is not None:
        as_job = JobPlan(
            report=_report_on_one_box(plan),
            placement=stage.placement,
            arena_nbytes=stage.arena_nbytes,
            from_attempt=job.attempt + 1,
        )
        fields["plan_number"] = keep_plan(settings, job, as_job)
    return fields


def _report_on_one_box(plan: StagesPlan) -> PlanReport:
    stage, engine_gib = plan.stages[0], None
    if stage.planned_device_nbytes is not None and stage.arena_nbytes is not None:
        engine_gib = {
            "gpu": stage.planned_device_nbytes / GIB,
            "host": stage.arena_nbytes / GIB,
            "ssd": stage.peak_gib.get("ssd", 0.0),
        }
    return PlanReport(
        feasible=True,
        reasons=plan.notes,
        step_s=plan.step_s,
        busy_s=stage.busy_s,
        peak_gib=dict(stage.peak_gib),
        engine_gib=engine_gib,
        choices={
            **(stage.choices or {}),
            "gpus": plan.num_ranks,
            "num_microbatches": plan.num_microbatches,
            "cut_matrices": plan.cut_matrices,
            "group_size": plan.group_size,
            "gradient_updates": plan.update_order.value,
        },
    )


def keep_stages(settings: Settings, job_id: str, plan: StagesPlan) -> None:
    """Stores the plan of a job over its boxes in place of an earlier one. Raises OSError."""
    write_durably(_path(settings, job_id), json.dumps(plan.to_json()))


def stages_of(settings: Settings, job_id: str) -> StagesPlan | None:
    """Returns the stored plan of a job over its boxes. An unreadable one counts as missing.

    None: the job is over several boxes and has none yet, or it has always been on one box.
    """
    return _read(_path(settings, job_id))


def division_of(settings: Settings, job: Job) -> StagesPlan | None:
    """Returns the division in which a job's blocks are. A job that has begun on one box is one stage of the head's box.

    None: it has not begun, or its stored division cannot be read. Raises OSError or ValueError if the job's layout or
    its plan on one box cannot be read.
    """
    stored = stages_of(settings, job.id)
    if stored is not None and stored.is_over_several:
        return stored
    if not job.attempt or (stored is None and _path(settings, job.id).exists()):
        return None
    # The row may have had other numbers of GPUs, and other plans, since the division was stored.
    plan = load_plan_on_one_box(settings, job)
    order = plan.update_order if plan is not None else None if stored is None else stored.update_order
    group_size = None if plan is None or plan.placement is None else plan.placement.group_size
    training = training_config_of(job)
    stage = StagePlan(
        box=HEAD_NAME,
        first_block=0,
        stop_block=len(ModelLayout.from_json(layout_file(job_dir(settings, job.id)).read_text()).blocks),
        placement=Placement(group_size=group_size or 1),
        num_optimizers=settings.num_cpu_optimizers,
        peak_gib={},
    )
    return StagesPlan(
        num_ranks=gpus_of(job),
        num_microbatches=training.num_microbatches,
        cut_matrices=training.cut_matrices,
        update_order=order or training.order_of_updates,
        step_s=None if plan is None else plan.report.step_s,
        stages=(stage,),
        layout_epoch=0 if stored is None else stored.layout_epoch,
        from_attempt=0 if stored is None else stored.from_attempt,
    )


def layout_epoch_on_one_box(settings: Settings, job_id: str) -> LayoutEpoch:
    """Returns the layout epoch of a job that is on one box.

    Raises ValueError if its states are on several: the job's row is older than their last move.
    """
    stored = stages_of(settings, job_id)
    if stored is not None and stored.is_over_several:
        raise ValueError(f"its states are on the boxes {', '.join(stored.boxes)}, and its row says that they are here")
    return FIRST_EPOCH if stored is None else LayoutEpoch(stored.layout_epoch)


def keep_simulated(settings: Settings, job_id: str, work_dir: Path, *, is_next: bool = False) -> None:
    """Stores the simulated step of a new plan, which its planner has left in `work_dir`, in place of an earlier one.

    `is_next`: of the division to which the job's states are to be moved. It counts from `next_simulated_counts` on.
    """
    _put_simulated(job_id, work_dir / SIMULATED_FOLDER, _simulated_dir(settings, job_id, is_next=is_next))
    shutil.rmtree(work_dir, ignore_errors=True)


def next_simulated_counts(settings: Settings, job_id: str) -> None:
    """Makes the simulated step of the next division that of the job, because its states have been moved. Idempotent."""
    made = _simulated_dir(settings, job_id, is_next=True)
    if made.exists():
        _put_simulated(job_id, made, _simulated_dir(settings, job_id))


def _put_simulated(job_id: str, made: Path, target: Path) -> None:
    """Puts a simulated step in place of another. An error is logged, because no job should wait or end for it."""
    try:
        made.mkdir(parents=True, exist_ok=True)  # empty if the step could not be simulated
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    except OSError as error:
        _LOG.warning("its planned step is not shown: %s", error, extra=about(job_id))


def _simulated_dir(settings: Settings, job_id: str, *, is_next: bool = False) -> Path:
    return job_dir(settings, job_id) / "prepare" / (_NEXT_SIMULATED if is_next else SIMULATED_FOLDER)


def keep_next_stages(settings: Settings, job_id: str, plan: StagesPlan) -> None:
    """Stores the division to which a job's states are to be moved. Raises OSError."""
    write_durably(_next_path(settings, job_id), json.dumps(plan.to_json()))


def forget_stages(settings: Settings, job_id: str) -> None:
    """Deletes the divisions of a job that has no states. Raises OSError."""
    forget_next_stages(settings, job_id)
    _path(settings, job_id).unlink(missing_ok=True)


def forget_next_stages(settings: Settings, job_id: str) -> None:
    """Gives up a division to which a job's states have not been moved. Raises OSError."""
    _next_path(settings, job_id).unlink(missing_ok=True)
    shutil.rmtree(_simulated_dir(settings, job_id, is_next=True), ignore_errors=True)


def next_stages_of(settings: Settings, job_id: str) -> StagesPlan | None:
    """Returns the division to which a job's states are to be moved, None if they are where they are to be."""
    before, after = stages_of(settings, job_id), _read(_next_path(settings, job_id))
    if before is None or after is None or after.layout_epoch <= before.layout_epoch:
        return None
    return after


def is_moved(settings: Settings, job_id: str, after: StagesPlan) -> bool:
    """Returns whether the job's log of decisions says that its states have been moved to a division."""
    decision = last_decision(job_dir(settings, job_id) / DECISIONS_FILE)
    return decision is not None and decision.epoch >= after.layout_epoch


def keep_told_stages(settings: Settings, job_id: str, told: Mapping[str, Any]) -> None:
    """Stores a plan as another box has told it, so that both have the same digest.

    It may be of an older release, whose plans have fewer fields.

    Raises:
        OSError: it cannot be stored.
        ValueError: it is not a plan.
    """
    StagesPlan.from_json(told)
    write_durably(_path(settings, job_id), json.dumps(told))


def told_stages(settings: Settings, job_id: str) -> dict[str, Any] | None:
    """Returns the plan of a job over several boxes as its file has it, for `keep_told_stages`. None: it has none."""
    try:
        values: dict[str, Any] = json.loads(_path(settings, job_id).read_text())
        StagesPlan.from_json(values)
    except (OSError, ValueError):
        return None
    return values


def move_in_words(settings: Settings, job: Job) -> str | None:
    """Returns what a running attempt waits for that moves the job's states; None if it is no move, or just begins."""
    progress = progress_of_move(job_dir(settings, job.id), Attempt(job.attempt)) if is_over_boxes(job) else None
    if progress is None:
        return None
    come, total = map(bytes_text, progress)
    return f"its states to be moved to its new boxes: {come} of {total} are there"


def stages_digest(settings: Settings, job_id: str) -> str | None:
    """Returns the SHA-256 of the plan of a job over several boxes, None if it has none."""
    try:
        return hashlib.sha256(_path(settings, job_id).read_bytes()).hexdigest()
    except OSError:
        return None


def stages_of_answer(answer: Mapping[str, Any]) -> StagesPlan:
    """Reads the planner's answer, the result PLAN_STAGES. Raises ValueError if it has no plan."""
    return StagesPlan.from_json(answer.get("stages", {}))


def build_stage_spec(
    settings: Settings,
    resources: MachineResources,
    job: Job,
    plan: StagesPlan,
    index: int,
    expected_pace: Pace | None = None,
) -> JobSpec:
    """Builds the specification of one box's part of the attempt in the job's row. `index`: the box's, from 0.

    `settings` and `resources` are those of the home that calls. They decide paths and threads, which only the box's own
    runner reads, and its budget of device memory. All else follows from the row and the plan. `expected_pace`: None
    stands for the step time by the plan.

    Raises:
        ValueError: the row has other numbers of micro-batches or GPUs than the plan, or another cut of matrices.
    """
    stage = plan.stages[index]
    # The threads are then those for as many optimizers as the plan has.
    settings = settings.model_copy(update={"num_cpu_optimizers": stage.num_optimizers})
    if expected_pace is None and plan.step_s is not None:
        expected_pace = Pace(step_s=plan.step_s, is_measured=False)
    spec = build_job_spec(settings, resources, job, expected_pace=expected_pace, num_ranks=plan.ranks[index])
    in_row, planned = (spec.training.num_microbatches, gpus_of(job)), (plan.num_microbatches, plan.num_ranks)
    if in_row != planned:
        raise ValueError(
            f"the job has {in_row[0]} micro-batches a step and {count_text(in_row[1], 'GPU')} of each box, and its "
            f"plan over several boxes is for {planned[0]} and {planned[1]}: make the plan again"
        )
    if spec.training.cut_matrices != plan.cut_matrices:
        raise ValueError(
            f"the job has cut_matrices {spec.training.cut_matrices}, and its plan over several boxes is for "
            f"{plan.cut_matrices}: make the plan again"
        )
    return replace(
        spec,
        training=replace(spec.training, update_order=plan.update_order),
        stages=plan.engine_stages if plan.is_over_several else (),
        ranks_of_boxes=plan.ranks if plan.is_over_several else (),
        box=index,
        box_names=plan.boxes if plan.is_over_several else (),
        layout_epoch=LayoutEpoch(plan.layout_epoch),
        placement=stage.placement,
        host_memory_nbytes=stage.host_memory_nbytes if stage.arena_nbytes is None else stage.arena_nbytes,
        planned_device_nbytes=stage.planned_device_nbytes,
    )


def build_move_spec(
    settings: Settings,
    resources: MachineResources,
    job: Job,
    plans: tuple[StagesPlan, StagesPlan],
    boxes: Sequence[str],
    index: int,
) -> MoveSpec:
    """Builds the specification of one box's part in a move, which is the attempt in the job's row.

    `plans`: the division before, and the one after. `boxes`: the names of all boxes of both, the first one first.
    `index`: that of the box among these. All else is as for `build_stage_spec`.
    """

    def part(plan: StagesPlan) -> JobSpec | None:
        if boxes[index] not in plan.boxes:
            return None
        return build_stage_spec(settings, resources, job, plan, plan.boxes.index(boxes[index]))

    before, after = plans
    holders, owners = ({stage.box: stage.stage for stage in plan.stages} for plan in plans)
    return MoveSpec(
        box=index,
        epoch=LayoutEpoch(after.layout_epoch),
        names=tuple(map(BoxName, boxes)),
        holders=tuple(map(holders.get, boxes)),
        owners=tuple(map(owners.get, boxes)),
        old=part(before),
        new=part(after),
    )


def _read(path: Path) -> StagesPlan | None:
    try:
        return StagesPlan.from_json(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def _path(settings: Settings, job_id: str) -> Path:
    return job_dir(settings, job_id) / STAGES_FILE


def _next_path(settings: Settings, job_id: str) -> Path:
    return job_dir(settings, job_id) / _NEXT_FILE
