"""Reports of plans over several boxes, for users and as JSON."""

from dataclasses import dataclass

from windlass.amounts import GB
from windlass.planner.question import PlanReport, report_of
from windlass.planner.stages.box_plans import BoxPlan, Run
from windlass.planner.stages.pipeline import Limit
from windlass.planner.stages.splits import PlannedStages

_RESOURCES = {
    "compute": "compute",
    "h2d": "copies to the GPUs",
    "d2h": "copies from the GPUs",
    "ssd": "SSDs",
    "optimizer": "updates",
    "host_memory": "host memory",
}
_LIMITS = {
    Limit.BUBBLE: "bubble",
    Limit.NETWORK: "network",
    Limit.UPDATES: "updates that no pass hides",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxReport:
    """The part of one box in a plan. Times in seconds a step, GiB 2^30 bytes."""

    hardware: str
    first_block: int  # block 0 is the embedding, the last one of the model is the head
    last_block: int
    num_layers: int
    gpus: int
    alone_s: float  # of a step of these blocks, if the box waited for no other
    busy_s: dict[str, float]  # by resource
    peak_gib: dict[str, float]  # by tier, with the memory of processes, the driver and its allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesReport:
    """A plan over one box or several, by the cost model. GB are 10^9 bytes."""

    step_s: float  # simulated if `is_simulated`, else by the formula
    formula_step_s: float
    is_simulated: bool
    tokens_per_s: float
    bound_by: str
    waiting_share: float  # of a step, in which the busiest box waits
    gpus: int  # of a box with most of them
    num_microbatches: int
    cut_matrices: int | None  # the most elements of a part of a matrix; None: no matrix is cut
    group_size: int
    num_rounds: int
    network_gb_per_step: float  # that the busiest network card sends; it receives as much
    network_s: float  # in which that card sends
    boxes: tuple[BoxReport, ...]


def report_of_stages(planned: PlannedStages, simulated_s: float | None = None) -> StagesReport:
    """Reports a plan. `simulated_s`: its step time by simulation; None: it was not simulated."""
    step_s = planned.step_s if simulated_s is None else simulated_s
    pipeline, rounds = planned.pipeline, planned.rounds
    job = planned.boxes[0].job(rounds)
    num_tokens = job.training.batch_size * job.model.num_tokens * job.model.size_share
    return StagesReport(
        step_s=step_s,
        formula_step_s=planned.step_s,
        is_simulated=simulated_s is not None,
        tokens_per_s=num_tokens / step_s,
        bound_by=_bound_in_words(planned),
        waiting_share=max(0.0, 1 - pipeline.parts_s[Limit.BOX] / step_s),
        gpus=rounds.num_ranks,
        num_microbatches=rounds.num_microbatches,
        cut_matrices=planned.plans[0].solution.costs.job.cut,
        group_size=rounds.group_size,
        num_rounds=rounds.number,
        network_gb_per_step=max(pipeline.sent_nbytes) / GB,
        network_s=pipeline.sending_s,
        boxes=tuple(
            _report_of_box(boxes.kind.name, run, plan)
            for boxes, run, plan in zip(planned.boxes, planned.runs, planned.plans, strict=True)
        ),
    )


def report_of_box(plan: BoxPlan) -> PlanReport:
    """Reports the plan of one box. Its times are those of a box that waits for no other."""
    solution = plan.solution
    return report_of(solution.costs.job, solution, is_cpu=solution.costs.speeds.shares_cores)


def _report_of_box(name: str, run: Run, plan: BoxPlan) -> BoxReport:
    report = report_of_box(plan)
    assert report.peak_gib is not None, "the plan fits"
    return BoxReport(
        hardware=name,
        first_block=run.first,
        last_block=run.stop - 1,
        num_layers=plan.solution.costs.job.model.num_own_layers,
        gpus=plan.solution.costs.job.num_ranks,
        alone_s=plan.times.alone_s,
        busy_s=plan.solution.busy_s,
        peak_gib=report.peak_gib,
    )


def _bound_in_words(planned: PlannedStages) -> str:
    limit, box = planned.pipeline.limit, planned.pipeline.busiest_box
    if limit is not Limit.BOX:
        return _LIMITS[limit]
    resource = _RESOURCES[planned.plans[box].solution.bottleneck]
    return resource if len(planned.boxes) == 1 else f"{resource} of box {box + 1}"
