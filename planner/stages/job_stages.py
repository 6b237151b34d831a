"""Plans a job over boxes, as the service asks for it."""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from windlass.actors.timeline import keep_step
from windlass.amounts import GB, GIB
from windlass.engine.data import DatasetError
from windlass.engine.model import ModelLayout
from windlass.planner.feasibility import with_part
from windlass.planner.hardware import Hardware
from windlass.planner.planning import question_of
from windlass.planner.profiling import FolderConfig
from windlass.planner.question import JobPlan, KeptShapes, Profiles
from windlass.planner.solver import commit_every_of
from windlass.planner.stages.box_plans import BoxKind, BoxPlan, BoxPlans, Run
from windlass.planner.stages.box_search import best_of_choices, check_division, choices_of
from windlass.planner.stages.even_stages import even_stages
from windlass.planner.stages.lacking import Lack, lacks_with_all
from windlass.planner.stages.predicted import fastest_by_simulation, simulated_timeline
from windlass.planner.stages.splits import PlannedStages
from windlass.planner.stages.stages_plan import StagePlan, StagesPlan
from windlass.planner.stages.stages_report import report_of_box
from windlass.planner.stages.stages_request import RequestedBox, StagesRequest

# The rate that a network is assumed to have if it is not known, in bytes per second each way: 1 Gbit/s.
ASSUMED_NETWORK_BYTES_PER_S = 125e6
# Boxes whose free space on SSDs differs by at most this share are planned as equal, with the least of them.
_ALIKE_SHARE = 1 / 16
# The same for rates of network cards: measurements of equal ones differ by as much.
_ALIKE_NETWORK_SHARE = 1 / 4
# Bytes of SSD for each param that are more than a job's states and gradients ever need.
_ENOUGH_NBYTES_OF_PARAM = 64
_LEAST_CAPACITY_GIB = 1.0  # that a profile may have


class StagesDoNotFitError(Exception):
    """The job does not fit the boxes. The message says which box lacks what."""


def plan_stages(
    request: StagesRequest, kept_shapes: KeptShapes | None = None, timeline_dir: Path | None = None
) -> StagesPlan:
    """Plans a job over the boxes of the request, the first of which gets the first blocks.

    If the job is to have some of them, they are those with the shortest step by prediction. If it is to have one, that
    is the first. If there are too few boxes that were measured, or the model cannot be planned by shapes alone, the
    plan is that of `even_stages`. `kept_shapes`: of earlier plans in this process. `timeline_dir`: a folder for the
    timeline of a simulated step. It is made if the plan's step can be simulated.

    Raises:
        StagesDoNotFitError: the boxes have too little memory.
        StagesError: the model cannot be divided over so many boxes.
        UnsupportedArchitectureError, UnusableConfigError: the model cannot be planned for.
    """
    layout = ModelLayout.from_json(request.layout_file.read_text())
    if request.number > 1:
        check_division(layout, request.number)
    first, *others = request.boxes
    measured = tuple(box for box in request.boxes if box.hardware is not None)
    if first.hardware is None or len(measured) < request.number:
        # Measured ones first, which are known to be boxes that can train.
        others.sort(key=lambda box: box.hardware is None)
        request = replace(request, boxes=(first, *others[: request.number - 1]), num_boxes=None)
        unmeasured = [box.name for box in request.boxes if box.hardware is None]
        are = "was not measured" if len(unmeasured) == 1 else "were not measured"
        why = f"{' and '.join(unmeasured)} {are}: run `windlass doctor` there for a plan by its rates"
        return _without_times(request, layout, why)
    try:
        request_measured = replace(request, boxes=measured, num_boxes=request.number)
        return _planned(request_measured, layout, kept_shapes or KeptShapes(), timeline_dir)
    except (DatasetError, RuntimeError, MemoryError) as error:
        # For example, operators whose output shapes depend on the data.
        why = f"no plan could be made: {type(error).__name__}: {error}"
        request = replace(request, boxes=measured[: request.number], num_boxes=None)
        return _without_times(request, layout, why)


def _without_times(request: StagesRequest, layout: ModelLayout, why: str) -> StagesPlan:
    without = "the layers are divided evenly" if request.number > 1 else "the job goes on without a new plan"
    return even_stages(request, layout, [f"{without}, because {why}"])


def _planned(
    request: StagesRequest, layout: ModelLayout, kept_shapes: KeptShapes, timeline_dir: Path | None
) -> StagesPlan:
    enough_nbytes = _ENOUGH_NBYTES_OF_PARAM * sum(block.numel for block in layout.blocks)
    groups, config = _equal_boxes(request, enough_nbytes), FolderConfig.read(request.model_dir)
    boxes = []
    for group in groups:
        hardware = _with_network(request, group, _with_room(group))
        question = replace(question_of(request.on(group[0], hardware), config), kept_shapes=kept_shapes)
        kind = BoxKind(name=group[0].name, number=len(group), question=question)
        boxes.append(BoxPlans(kind=kind, profiles=Profiles(question)))
    choices, lacks = choices_of(boxes, request.number), list[Sequence[Lack]]()
    if len(choices) > 1:
        # Those that lack nothing first; the sort keeps their order.
        by_lack = sorted(
            ((lacks_with_all(choice, layout), choice) for choice in choices), key=lambda each: _nbytes(each[0])
        )
        lacks, choices = [lack for lack, _ in by_lack], [choice for _, choice in by_lack]
    planned = best_of_choices(choices)
    if planned is None:
        least = lacks[0] if lacks else lacks_with_all(choices[0], layout)
        of_kinds = {group[0].name: group for group in groups}
        names = [box.name for plans, number in choices[0] for box in of_kinds[plans.kind.name][:number]]
        raise StagesDoNotFitError(_lacks_in_words(least, names, is_closest=len(choices) > 1))
    near, other_rounds = (
        tuple(_over_their_network(each, request, groups) for each in plans)
        for plans in (planned.near, planned.other_rounds)
    )
    find_other_cut = planned.find_other_cut

    def with_other_cut(below_s: float) -> PlannedStages | None:
        other = find_other_cut(below_s)
        return None if other is None else _over_their_network(other, request, groups)

    planned = replace(
        _over_their_network(planned, request, groups),
        near=near,
        other_rounds=other_rounds,
        find_other_cut=with_other_cut,
    )
    planned, simulated_s = fastest_by_simulation(planned)
    step_s = planned.step_s if simulated_s is None else simulated_s
    in_order = _boxes_of(planned, groups)
    if timeline_dir is not None and simulated_s is not None:
        timeline = simulated_timeline(planned, [box.name for box in in_order])
        if timeline is not None:
            keep_step(timeline_dir, timeline)
    return _plan_of(planned, in_order, step_s=step_s, notes=_notes(request, in_order))


def _boxes_of(planned: PlannedStages, groups: Sequence[Sequence[RequestedBox]]) -> list[RequestedBox]:
    """Returns the boxes of a plan in the order of their blocks."""
    left = {group[0].name: deque(group) for group in groups}
    return [left[plans.kind.name].popleft() for plans in planned.boxes]


def _over_their_network(
    planned: PlannedStages, request: StagesRequest, groups: Sequence[Sequence[RequestedBox]]
) -> PlannedStages:
    """Returns a plan whose network is that between its own boxes, as far as it was measured; see `rate_of`."""
    names = [box.name for box in _boxes_of(planned, groups)]
    ways = list(itertools.pairwise(names))
    if planned.pipeline.shared_params_nbytes:
        ways.append((names[0], names[-1]))
    rates = {way: rate for way in ways if (rate := request.rate_between(*way)) is not None}
    cards = tuple(
        max((rate for way, rate in rates.items() if name in way), default=assumed)
        for name, assumed in zip(names, planned.pipeline.network_bytes, strict=True)
    )
    return replace(planned, pipeline=replace(planned.pipeline, network_bytes=cards))


def _equal_boxes(request: StagesRequest, enough_nbytes: int) -> list[list[RequestedBox]]:
    """Groups boxes that share plans. The first group begins with the first box.

    They differ in their names only, and in the space on their SSDs if it is nearly the same, or more than enough. The
    rates of their network cards are nearly the same.
    """
    groups: list[list[RequestedBox]] = []
    for box in request.boxes:
        for group in groups:
            first = group[0]
            rates = request.rate_of(first.name), request.rate_of(box.name)
            if (
                replace(first, name=box.name, ssd_nbytes=box.ssd_nbytes) == box
                and _alike(first.ssd_nbytes, box.ssd_nbytes, enough=enough_nbytes, share=_ALIKE_SHARE)
                and _alike(*rates, enough=math.inf, share=_ALIKE_NETWORK_SHARE)
            ):
                group.append(box)
                break
        else:
            groups.append([box])
    return groups


def _alike(one: float | None, other: float | None, *, enough: float, share: float) -> bool:
    """Returns whether boxes with such facts share plans. None: as their equal hardware says.

    The facts differ by at most this share, or are enough.
    """
    if one is None or other is None:
        return one is other
    least, most = sorted((one, other))
    return least >= enough or most <= (1 + share) * least


def _with_room(group: Sequence[RequestedBox]) -> Hardware:
    """Returns the hardware of equal boxes with the space that is free on the SSDs of each."""
    hardware, free = group[0].hardware, [box.ssd_nbytes for box in group if box.ssd_nbytes is not None]
    assert hardware is not None, "all boxes were measured"
    if not free or not hardware.ssds.count:
        return hardware
    capacity_gib = max(_LEAST_CAPACITY_GIB, min(free) / hardware.ssds.count / GIB)
    return with_part(hardware, ssds=with_part(hardware.ssds, capacity_gib=capacity_gib))


def _with_network(request: StagesRequest, group: Sequence[RequestedBox], hardware: Hardware) -> Hardware:
    """Returns the hardware of equal boxes with the rate of their slowest network card."""
    rates = (request.rate_of(box.name) for box in group)
    rate = min((rate for rate in rates if rate is not None), default=None)
    if rate is None and hardware.network_gb_per_s is not None:
        return hardware
    return hardware.model_copy(update={"network_gb_per_s": (rate or ASSUMED_NETWORK_BYTES_PER_S) / GB})


def _notes(request: StagesRequest, boxes: Sequence[RequestedBox]) -> list[str]:
    """Tells what was assumed. `boxes`: those of the plan."""
    assumes = len(boxes) > 1 and any(
        request.rate_of(box.name) is None and box.hardware is not None and box.hardware.network_gb_per_s is None
        for box in boxes
    )
    rate = 8 * ASSUMED_NETWORK_BYTES_PER_S / 1e9
    if not assumes:
        return []
    return [
        f"the rate of the network between the boxes is not known; {rate:g} Gbit/s are assumed. `windlass doctor "
        "--network` measures it, for the next plan"
    ]


def _plan_of(
    planned: PlannedStages, boxes: Sequence[RequestedBox], *, step_s: float, notes: Sequence[str]
) -> StagesPlan:
    commit_every = commit_every_of(plan.solution.plan for plan in planned.plans)
    return StagesPlan(
        num_ranks=planned.rounds.num_ranks,
        num_microbatches=planned.rounds.num_microbatches,
        update_order=planned.plans[0].solution.costs.job.update_order,
        cut_matrices=planned.plans[0].solution.costs.job.cut,
        step_s=step_s,
        stages=tuple(
            _stage_of(box, run, plan, commit_every, most_ranks=planned.rounds.num_ranks)
            for box, run, plan in zip(boxes, planned.runs, planned.plans, strict=True)
        ),
        notes=tuple(notes),
    )


def _stage_of(box: RequestedBox, run: Run, plan: BoxPlan, commit_every: int, *, most_ranks: int) -> StagePlan:
    solution, num_ranks = plan.solution, run.ranks[run.stage]
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
        busy_s=as_job.report.busy_s,
        choices=as_job.report.choices,
        num_ranks=None if num_ranks == most_ranks else num_ranks,
    )


def _nbytes(lacks: Sequence[Lack]) -> int:
    return sum(lack.nbytes for lack in lacks)


def _lacks_in_words(lacks: Sequence[Lack], names: Sequence[str], *, is_closest: bool) -> str:
    """Tells what boxes lack. `is_closest`: they lack least of several choices of boxes."""
    if not lacks:
        these = f"the boxes {', '.join(names)}" if is_closest else "these boxes"
        return f"no plan over {these} was found, and it is close to their memory: add memory, or one more box"
    told = [lack.in_words(names[lack.box]) for lack in lacks]
    closest = f", of any {len(names)}: {', '.join(names)} lack least" if is_closest else ""
    return f"the job does not fit these boxes{closest}. {'. '.join(lack[0].upper() + lack[1:] for lack in told)}"
