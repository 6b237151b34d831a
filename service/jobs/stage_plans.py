"""The plan of a job over several boxes, in the job's folder, and the specification of each box's part.

The first box is that of the head, which owns the job. All boxes read the same plan and the same row. So the head
derives for each box what that box derives for its own part.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.actors.job import JobSpec, Pace
from windlass.actors.runtime.moving import MoveSpec
from windlass.planner.stages import RequestedBox, StagesPlan, StagesRequest
from windlass.service.installation import Settings
from windlass.service.jobs.box_plans import BoxKind
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.spec_builder import (
    build_job_spec,
    chooses_gpus,
    dataset_dir,
    gpus_of,
    job_dir,
    layout_file,
    settings_of,
    training_config_of,
    with_gpus,
)
from windlass.service.preparation import PREPARE_DATA
from windlass.service.validation import count_text, model_dir
from windlass.storage.files import write_durably
from windlass.storage.ids import BoxName, LayoutEpoch
from windlass.storage.sql import Job
from windlass.storage.sql.repositories import JobFields
from windlass.storage.store import DECISIONS_FILE, last_decision

STAGES_FILE = "prepare/stages.json"  # in a job's folder
_NEXT_FILE = "prepare/next-stages.json"  # there: the division to which the job's states are to be moved


def stages_request(
    settings: Settings,
    job: Job,
    boxes: Sequence[tuple[str, BoxKind, int | None]],
    num_boxes: int,
    network_bytes_per_s: float | None,
    before: StagesPlan | None = None,
) -> StagesRequest:
    """Makes the request for a prepared job over so many of these boxes, the first of which is the head's own.

    The plan may choose the number of micro-batches if the settings leave it open and the job has not begun.
    `boxes`: each with its name, its kind, and the bytes that are free on its SSDs, None if they are not known.
    `network_bytes_per_s`: between the boxes, each way; None: it is not known. `before`: the job's division so far, from
    which a new one takes all on which the bits of its results depend.

    Raises:
        OSError, ValueError: the job's data is gone, or a box has too few GPUs.
    """
    folder, asked, training = job_dir(settings, job.id), settings_of(job).windlass, training_config_of(job)
    prepared = json.loads((folder / "prepare" / f"{PREPARE_DATA}.json").read_text())
    chooses_microbatches = asked.num_microbatches is None and not job.attempt
    most_microbatches = training.batch_size if chooses_microbatches else training.num_microbatches
    most_gpus = min(kind.resources.most_gpus for _, kind, _ in boxes)
    num_ranks = asked.with_most_gpus(most_gpus, most_microbatches).least_gpus
    if before is not None:
        num_ranks, training = before.num_ranks, replace(training, update_order=before.update_order)
    for name, kind, _ in boxes:
        if (why := kind.resources.why_too_many(num_ranks)) is not None:
            raise ValueError(f"box {name}: {why}")
    return StagesRequest(
        model_dir=model_dir(job.model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir),
        layout_file=layout_file(folder),
        dataset_dir=dataset_dir(folder),
        training=training,
        num_validation_examples=prepared["num_validation_examples"],
        chooses_microbatches=chooses_microbatches,
        chooses_order=asked.leaves_order_open and before is None,
        num_ranks=num_ranks,
        chooses_ranks=chooses_gpus(job) and before is None,
        boxes=tuple(_requested(*box, job) for box in boxes),
        num_boxes=num_boxes,
        network_bytes_per_s=network_bytes_per_s,
    )


def _requested(name: str, kind: BoxKind, ssd_nbytes: int | None, job: Job) -> RequestedBox:
    bounds = kind.bounds(settings_of(job).windlass)
    return RequestedBox(
        name=name,
        hardware=kind.hardware,
        num_optimizers=bounds.num_optimizers,
        host_memory_nbytes=bounds.host_memory_nbytes,
        device_memory_nbytes=bounds.device_memory_nbytes,
        ssd_nbytes=ssd_nbytes,
    )


def fields_of_stages(job: Job, plan: StagesPlan) -> JobFields:
    """Returns the fields of the row of a job that gets this plan, to be written before its first attempt.

    The row then has the plan's numbers of micro-batches and GPUs. The first one decides the last bits of the results.

    Raises:
        ValueError: the job has begun with another number of micro-batches.
    """
    hyperparameters = with_gpus(job, plan.num_ranks) if chooses_gpus(job) else dict(job.hyperparameters or {})
    before = hyperparameters.get("num_microbatches")
    if job.attempt and before != plan.num_microbatches:
        raise ValueError(
            f"the job has begun with num_microbatches {before}, on which its results depend, and the plan has "
            f"{plan.num_microbatches}: make the plan again"
        )
    return {"hyperparameters": hyperparameters | {"num_microbatches": plan.num_microbatches}}


def keep_stages(settings: Settings, job_id: str, plan: StagesPlan) -> None:
    """Stores the plan of a job over several boxes in place of an earlier one. Raises OSError."""
    write_durably(_path(settings, job_id), json.dumps(plan.to_json()))


def stages_of(settings: Settings, job_id: str) -> StagesPlan | None:
    """Returns the plan of a job over several boxes, or None if it has none. An unreadable one counts as missing."""
    return _read(_path(settings, job_id))


def keep_next_stages(settings: Settings, job_id: str, plan: StagesPlan) -> None:
    """Stores the division to which a job's states are to be moved. Raises OSError."""
    write_durably(_next_path(settings, job_id), json.dumps(plan.to_json()))


def forget_next_stages(settings: Settings, job_id: str) -> None:
    """Gives up a division to which a job's states have not been moved. Raises OSError."""
    _next_path(settings, job_id).unlink(missing_ok=True)


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
        ValueError: the row has other numbers of micro-batches or GPUs than the plan.
    """
    stage = plan.stages[index]
    # The threads are then those for as many optimizers as the plan has.
    settings = settings.model_copy(update={"num_cpu_optimizers": stage.num_optimizers})
    if expected_pace is None and plan.step_s is not None:
        expected_pace = Pace(step_s=plan.step_s, is_measured=False)
    spec = build_job_spec(settings, resources, job, expected_pace=expected_pace)
    in_row, planned = (spec.training.num_microbatches, gpus_of(job)), (plan.num_microbatches, plan.num_ranks)
    if in_row != planned:
        raise ValueError(
            f"the job has {in_row[0]} micro-batches a step and {count_text(in_row[1], 'GPU')} of each box, and its "
            f"plan over several boxes is for {planned[0]} and {planned[1]}: make the plan again"
        )
    return replace(
        spec,
        training=replace(spec.training, update_order=plan.update_order),
        stages=plan.engine_stages,
        box=index,
        box_names=tuple(each.box for each in plan.stages),
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
        names = [stage.box for stage in plan.stages]
        if boxes[index] not in names:
            return None
        return build_stage_spec(settings, resources, job, plan, names.index(boxes[index]))

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
