"""Plans a job over several boxes, as the service asks for it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from windlass.amounts import GB
from windlass.engine.data import DatasetError
from windlass.engine.model import ModelLayout
from windlass.planner.hardware import Hardware
from windlass.planner.planning import question_of
from windlass.planner.profiling import FolderConfig
from windlass.planner.question import JobPlan, KeptShapes, Profiles
from windlass.planner.stages.box_plans import BoxKind, BoxPlan, BoxPlans, Run
from windlass.planner.stages.box_search import best_over_all, check_division
from windlass.planner.stages.even_stages import even_division, even_stages
from windlass.planner.stages.lacking import lacks_of
from windlass.planner.stages.predicted import simulated_step_s
from windlass.planner.stages.splits import PlannedStages
from windlass.planner.stages.stages_plan import StagePlan, StagesPlan
from windlass.planner.stages.stages_report import report_of_box
from windlass.planner.stages.stages_request import RequestedBox, StagesRequest

# The rate that a network is assumed to have if it is not known, in bytes per second each way: 1 Gbit/s.
ASSUMED_NETWORK_BYTES_PER_S = 125e6


class StagesDoNotFitError(Exception):
    """The job does not fit the boxes. The message says which box lacks what."""


def plan_stages(request: StagesRequest, kept_shapes: KeptShapes | None = None) -> StagesPlan:
    """Plans a job over all boxes of the request, the first of which gets the first blocks.

    If a box was not measured, or the model cannot be planned by shapes alone, the plan is that of `even_stages`.
    `kept_shapes`: of earlier plans in this process.

    Raises:
        StagesDoNotFitError: the boxes have too little memory.
        StagesError: the model cannot be divided over so many boxes.
        UnsupportedArchitectureError, OSError, ValueError: the model cannot be planned for.
    """
    layout = ModelLayout.from_json(request.layout_file.read_text())
    check_division(layout, len(request.boxes), 1 if request.chooses_ranks else request.num_ranks)
    unmeasured = [box.name for box in request.boxes if box.hardware is None]
    if unmeasured:
        are = "was not measured" if len(unmeasured) == 1 else "were not measured"
        why = f"{' and '.join(unmeasured)} {are}: run `windlass doctor` there for a plan by its rates"
        return even_stages(request, layout, [f"the layers are divided evenly, because {why}"])
    try:
        return _planned(request, layout, kept_shapes or KeptShapes())
    except (DatasetError, RuntimeError, MemoryError) as error:
        # For example, operators whose output shapes depend on the data.
        why = f"no plan could be made: {type(error).__name__}: {error}"
        return even_stages(request, layout, [f"the layers are divided evenly, because {why}"])


def _planned(request: StagesRequest, layout: ModelLayout, kept_shapes: KeptShapes) -> StagesPlan:
    groups, config = _equal_boxes(request.boxes), FolderConfig.read(request.model_dir)
    boxes = []
    for group in groups:
        hardware = _with_network(request, group[0])
        question = replace(question_of(request.on(group[0], hardware), config), kept_shapes=kept_shapes)
        kind = BoxKind(name=group[0].name, number=len(group), question=question)
        boxes.append(BoxPlans(kind=kind, profiles=Profiles(question)))
    planned = best_over_all(boxes)
    if planned is None:
        by_name = {box.name: plans for plans, group in zip(boxes, groups, strict=True) for box in group}
        plans_in_order = [by_name[box.name] for box in request.boxes]
        raise StagesDoNotFitError(_lacks_in_words(request.boxes, plans_in_order, layout))
    left = {group[0].name: deque(group) for group in groups}
    in_order = [left[plans.kind.name].popleft() for plans in planned.boxes]
    return _plan_of(planned, in_order, notes=_notes(request))


def _equal_boxes(boxes: Sequence[RequestedBox]) -> list[list[RequestedBox]]:
    """Groups boxes that differ in their names only, which share plans. The first group begins with the first box."""
    groups: list[list[RequestedBox]] = []
    for box in boxes:
        group = next((group for group in groups if replace(group[0], name=box.name) == box), None)
        if group is None:
            groups.append([box])
        else:
            group.append(box)
    return groups


def _with_network(request: StagesRequest, box: RequestedBox) -> Hardware:
    assert box.hardware is not None, "all boxes were measured"
    rate = request.network_bytes_per_s
    if rate is None and box.hardware.network_gb_per_s is not None:
        return box.hardware
    return box.hardware.model_copy(update={"network_gb_per_s": (rate or ASSUMED_NETWORK_BYTES_PER_S) / GB})


def _notes(request: StagesRequest) -> list[str]:
    assumes = request.network_bytes_per_s is None and any(
        box.hardware is not None and box.hardware.network_gb_per_s is None for box in request.boxes
    )
    rate = 8 * ASSUMED_NETWORK_BYTES_PER_S / 1e9
    return [f"the rate of the network between the boxes is not known; {rate:g} Gbit/s are assumed"] if assumes else []


def _plan_of(planned: PlannedStages, boxes: Sequence[RequestedBox], *, notes: Sequence[str]) -> StagesPlan:
    # All boxes commit at once. A box without states in memory commits as seldom as those with some.
    commit_every = max(plan.solution.plan.commit_every for plan in planned.plans)
    return StagesPlan(
        num_ranks=planned.rounds.num_ranks,
        num_microbatches=planned.rounds.num_microbatches,
        update_order=planned.plans[0].solution.costs.job.update_order,
        step_s=simulated_step_s(planned) or planned.step_s,
        stages=tuple(
            _stage_of(box, run, plan, commit_every)
            for box, run, plan in zip(boxes, planned.runs, planned.plans, strict=True)
        ),
        notes=tuple(notes),
    )


def _stage_of(box: RequestedBox, run: Run, plan: BoxPlan, commit_every: int) -> StagePlan:
    solution = plan.solution
    as_job = JobPlan(
        report=report_of_box(plan),
        placement=replace(solution.placement, commit_every=commit_every),
        arena_nbytes=solution.plan.arena_nbytes,
    )
    assert as_job.placement is not None, "it was set"
    return StagePlan(
        box=box.name,
        first_block=run.first,
        stop_block=run.stop,
        placement=as_job.placement,
        num_optimizers=box.num_optimizers,
        host_memory_nbytes=box.host_memory_nbytes,
        arena_nbytes=as_job.arena_nbytes,
        planned_device_nbytes=as_job.planned_device_nbytes,
        peak_gib=dict(as_job.report.peak_gib or {}),
    )


def _lacks_in_words(boxes: Sequence[RequestedBox], plans: Sequence[BoxPlans], layout: ModelLayout) -> str:
    even = even_division([block.numel for block in layout.blocks], len(boxes))
    lacks = [lack.in_words(boxes[lack.box].name) for lack in lacks_of(plans, even)]
    if not lacks:
        return "no plan over these boxes was found, and it is close to their memory: add memory, or one more box"
    return f"the job does not fit these boxes. {'. '.join(lack[0].upper() + lack[1:] for lack in lacks)}"
