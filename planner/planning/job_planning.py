"""Plans a job as the service asks for it: a request in, a plan with its placement out."""

import functools
import math
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.actors.timeline import SIMULATED_FOLDER, keep_step
from windlass.engine.data import example_lengths
from windlass.engine.memory_plan import ExampleLengths
from windlass.planner.planning.gpu_choice import ChosenGpus, choose_gpus
from windlass.planner.planning.planner import Planned, answer, planned
from windlass.planner.planning.process import CannotBePlannedError
from windlass.planner.planning.replan import RunningJob, correct, costs_of
from windlass.planner.planning.simulated_search import NOBODY, Watcher
from windlass.planner.predictions import MIN_STEPS, PastPredictions, load_measured
from windlass.planner.profiling import TimingCache, read_config
from windlass.planner.question import (
    JobPlan,
    KeptShapes,
    PlanQuestion,
    PlanReport,
    PlanRequest,
    Profiles,
    ReplanRequest,
    SimulatedStep,
)
from windlass.planner.simulation import Stuck, TooLong, simulate_planned
from windlass.planner.solver import Solution

_FACTS_FOLDER = "traced"  # in the folder of block times: the facts of models that were traced


def plan_job(
    request: PlanRequest,
    folder: Path,
    marker: Path | None = None,
    kept_shapes: KeptShapes | None = None,
    with_what_if: Callable[[PlanQuestion, Planned, Watcher, Callable[[Planned, int], None]], Planned] | None = None,
    watcher: Watcher = NOBODY,
    is_alone: Callable[[], bool] | None = None,
    tell: Callable[[JobPlan], None] | None = None,
) -> JobPlan:
    """Plans a job, or plans a running job again.

    A simulation writes the spans of a step to `folder`. `marker`: a file that exists during measurements.
    `kept_shapes`: of earlier plans in this process. `with_what_if`: adds answers for changes, if the request asks so.
    `watcher`: see `watcher_of`. `is_alone`: see `question_of`. `tell`: takes the plan with the changes so far, and the
    number that is left.

    Raises:
        UnsupportedArchitectureError, UnusableConfigError: the model cannot be planned for.
        DatasetError: the job's data is missing.
        DeviceNeedUnknownError: the model cannot be planned by shapes alone.
        CannotBePlannedError: too few steps were measured, or the running job's plan lacks values.
        TimesLackError: times lack that another process is to measure.
    """
    config = read_config(request.model_dir, request.training.sequence_length)
    question = question_of(request, config, marker, is_alone)
    question = replace(question, kept_shapes=kept_shapes or KeptShapes())
    if request.running is not None:
        return _plan_again(question, request.running)
    chosen = choose_gpus(question, watcher) if request.chooses_ranks else ChosenGpus(planned=answer(question, watcher))
    if request.what_if and with_what_if is not None:

        def tell_changes(so_far: Planned, num_left: int) -> None:
            if tell is not None:
                tell(_job_plan(so_far).model_copy(update={"num_changes_left": num_left}))

        chosen = replace(chosen, planned=with_what_if(question, chosen.planned, watcher, tell_changes))
    found, plan = chosen.planned, _job_plan(chosen.planned)
    if chosen.others:
        plan = plan.model_copy(update={"others": tuple(_job_plan(other) for other in chosen.others)})
    if found.solution is not None and request.simulation_s:
        return _with_simulation(plan, request, found, folder)
    return plan


def watcher_of(tell: Callable[[JobPlan], None] | None, check: Callable[[], None]) -> Watcher:
    """Returns a watcher that tells of the best plan by the cost model, and of the plan before its advice.

    With several numbers of GPUs, each better one by the cost model is told. None: it tells nothing. `check`: see
    `Watcher`.
    """
    if tell is None:
        return Watcher(check=check)
    least_s = defaultdict[bool, float](lambda: math.inf)

    def see_estimate(question: PlanQuestion, profiles: Profiles, solution: Solution) -> None:
        is_first = profiles.is_by_rates  # steps by rates say nothing of those by measured times
        if solution.step_s < least_s[is_first]:
            least_s[is_first] = solution.step_s
            plan = _job_plan(planned(question, solution.costs.job, solution, profiles))
            will_be_measured = is_first and not question.leaves_unmeasured
            tell(plan.model_copy(update={"to_be_measured": True}) if will_be_measured else plan)

    def see_plan(report: PlanReport, solution: Solution) -> None:
        plan = _job_plan(Planned(report=report, solution=solution))
        tell(plan.model_copy(update={"lacks_advice": True}))

    return Watcher(see_estimate=see_estimate, see_plan=see_plan, check=check)


def question_of(
    request: PlanRequest, config: Any, marker: Path | None = None, is_alone: Callable[[], bool] | None = None
) -> PlanQuestion:
    """Builds the planner's question about a model.

    `config`: a transformers config, or one that is not loaded yet. `marker`: a file to be there while blocks of the
    model are measured. `is_alone`: returns whether no other job computes on this machine now; None: as the request
    says.
    """
    kept_times = None
    if request.kept_times_dir is not None:
        machine = request.hardware.model_dump(mode="json") | {"num_threads": request.compute_threads}
        kept_times = TimingCache(
            folder=request.kept_times_dir,
            machine=machine,
            is_alone=is_alone or (lambda: request.is_alone),
            takes_lapsed=not request.measures,
            marker=marker,
        )
    past = None
    if request.kept_times_dir is not None and request.compute_threads is not None:
        past = PastPredictions(folder=request.kept_times_dir)
    question = PlanQuestion(
        config=config,
        hardware=request.hardware,
        training=request.training,
        chooses_microbatches=request.chooses_microbatches,
        chooses_cut=request.chooses_cut,
        chooses_order=request.chooses_order,
        lengths=_lengths_of(request),
        num_validation_examples=request.num_validation_examples,
        num_ranks=request.num_ranks,
        chooses_ranks=request.chooses_ranks,
        num_optimizers=request.num_optimizers,
        host_memory_nbytes=request.host_memory_nbytes,
        device_memory_nbytes=request.device_memory_nbytes,
        measures=request.measures,
        measures_apart=request.measures_apart,
        leaves_unmeasured=request.leaves_unmeasured,
        measure_threads=request.compute_threads,
        kept_times=kept_times,
        past=past,
        kept_facts_dir=None if request.kept_times_dir is None else request.kept_times_dir / _FACTS_FOLDER,
    )
    if question.chooses_cut:
        question = replace(question, training=replace(question.training, cut_matrices=None))
    if not question.chooses_microbatches:
        return question
    # So that the question does not depend on the number that the request happens to have.
    number = min(question.least_microbatches, question.training.batch_size)
    return replace(question, training=replace(question.training, num_microbatches=number))


def _lengths_of(request: PlanRequest) -> Callable[[int, int], ExampleLengths] | None:
    """Returns a function that reads the lengths of the job's examples, once for each pair of its arguments."""
    if (folder := request.dataset_dir) is None:
        return None
    training = request.training

    @functools.cache
    def lengths(batch_size: int, num_microbatches: int) -> ExampleLengths:
        return example_lengths(
            folder,
            batch_size=batch_size,
            num_microbatches=num_microbatches,
            seed=training.seed,
            num_steps=training.total_steps,
        )

    return lengths


def _plan_again(question: PlanQuestion, request: ReplanRequest) -> JobPlan:
    number = request.plan.num_gpus if question.chooses_ranks else question.num_ranks
    # The running job keeps its order of updates until its next plan for other reasons.
    training = replace(question.training, update_order=request.plan.update_order or question.training.update_order)
    question = replace(question, training=training, num_ranks=number, chooses_ranks=False, chooses_order=False)
    assert not question.chooses_cut, "a job that runs keeps its matrices as they are"
    profiles, running = Profiles(question), _running_job(request)
    is_cpu = question.hardware.gpus.count == 0
    steps = load_measured(
        request.timeline_dir,
        profiles.layout,
        first_step=request.first_step,
        shares_cores=is_cpu,
        read_to_write=question.speeds.ssd_read_bytes / question.speeds.ssd_write_bytes,
        microbatches=costs_of(question, profiles, running).microbatches_of_ranks,
    )
    if len(steps) < MIN_STEPS:
        raise CannotBePlannedError(
            f"spans of {len(steps)} steps from step {request.first_step} on are stored; {MIN_STEPS} are needed"
        )
    others = [other.num_gpus for other in request.plan.others]
    corrected = correct(question, profiles, running, steps, other_numbers=others)
    plan = _job_plan(corrected.planned)
    changes: dict[str, Any] = {"changes": corrected.changes, "message": corrected.in_words}
    if corrected.others:
        changes["others"] = tuple(_job_plan(other) for other in corrected.others)
    if not corrected.changes:
        changes |= {"placement": request.plan.placement, "arena_nbytes": request.plan.arena_nbytes}
    return plan.model_copy(update=changes)


def _running_job(request: ReplanRequest) -> RunningJob:
    """Describes the running job.

    Raises CannotBePlannedError if its plan lacks values, as a plan of an older release may.
    """
    plan, report = request.plan, request.plan.report
    if plan.placement is None or plan.arena_nbytes is None:
        raise CannotBePlannedError("the job's plan has no placement")
    if report.choices is None or report.step_s is None or report.busy_s is None:
        raise CannotBePlannedError("the job's plan lacks predicted values")
    return RunningJob(
        placement=plan.placement,
        arena_nbytes=plan.arena_nbytes,
        spills_grads=report.choices["kept_grads_on_ssd"] > 0,
        step_s=report.step_s,
        compute_s=report.busy_s["compute"],
        num_steps_left=request.num_steps_left,
        restart_s=request.restart_s,
        may_change=request.may_change,
    )


def _job_plan(planned: Planned) -> JobPlan:
    if (solution := planned.solution) is None:
        return JobPlan(report=planned.report)
    return JobPlan(report=planned.report, placement=solution.placement, arena_nbytes=solution.plan.arena_nbytes)


def _with_simulation(plan: JobPlan, request: PlanRequest, planned: Planned, folder: Path) -> JobPlan:
    """Simulates the plan with queues and waits. Adds the step's time and summary, or a warning on failure."""
    assert planned.solution is not None, "it fits"
    assert planned.layout is not None, "there is such a model"
    num_cores = len(os.sched_getaffinity(0))
    try:
        simulated = simulate_planned(
            planned.solution, planned.layout, num_cores=num_cores, limit_s=request.simulation_s
        )
    except TooLong:
        why = f"it takes longer than {request.simulation_s:g} s"
    except (Stuck, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    else:
        last = simulated.steps[-1]
        keep_step(folder / SIMULATED_FOLDER, last)
        # The reported step time, which is at least the cost model's bound.
        assert planned.report.step_s is not None, "it fits"
        simulated_step = SimulatedStep(step_s=planned.report.step_s, summary=last.summary)
        return plan.model_copy(update={"simulated": simulated_step})
    warning = f"the planned job was not simulated, so its steps may take longer than planned: {why}"
    return plan.model_copy(update={"warnings": (warning,)})
