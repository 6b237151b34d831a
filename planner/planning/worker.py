"""Plans a job in a process of its own: `python -m windlass.planner.planning.worker --question FILE --result FILE`."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from windlass.actors.lifecycle import NICENESS_BESIDE_COMPUTE
from windlass.actors.timeline import SIMULATED_FOLDER, keep_step
from windlass.engine.data import DatasetError, example_lengths
from windlass.engine.device import retain_freed_memory
from windlass.engine.memory_plan import ExampleLengths
from windlass.engine.model import UnsupportedArchitectureError, load_config
from windlass.engine.training_config import TrainingConfig
from windlass.planner.hardware import Hardware
from windlass.planner.planning.job_plan import JobPlan, ReplanRequest, SimulatedStep
from windlass.planner.planning.measured_steps import MIN_STEPS, load_measured
from windlass.planner.planning.planner import Planned, PlanQuestion, Profiles, answer
from windlass.planner.planning.replan import RunningJob, correct
from windlass.planner.profiling import TimingCache
from windlass.planner.simulation import Stuck, TooLong, simulate_planned


class PlanOrder(BaseModel):
    """A question to the planner, as stored in a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path
    hardware: Hardware
    training: TrainingConfig
    chooses_microbatches: bool = False  # search the fastest number of micro-batches, instead of the config's
    # The prepared data that the job trains on; None: every example has the maximum length.
    dataset_dir: Path | None = None
    num_validation_examples: int = 0
    num_optimizers: int
    host_memory_nbytes: int | None  # budget of the arena
    device_memory_nbytes: int | None
    compute_threads: int | None = None  # threads of a local GPU worker; None: the hardware is another machine
    may_measure: bool = True  # time the model's blocks with these threads; else use stored times or rates
    kept_times_dir: Path | None = None  # folder of stored block times; None: times are not stored
    is_alone: bool = False  # no other job computes on this machine, so new measurements are reliable
    simulation_s: float = 0.0  # maximum seconds of the plan's simulation; 0: do not simulate
    running: ReplanRequest | None = None  # plan again with the measurements of a running job


def plan_job(order: PlanOrder, folder: Path, marker: Path | None = None) -> JobPlan:
    """Plans a job, or plans a running job again.

    A simulation writes the spans of a step to `folder`. `marker`: a file that exists during measurements.

    Raises:
        UnsupportedArchitectureError, OSError, ValueError: the model cannot be planned for.
        DatasetError: the job's data is missing.
        RuntimeError: the model cannot be planned by shapes alone, or too few steps were measured.
    """
    question = question_of(order, load_config(order.model_dir), marker)
    if order.running is not None:
        return _plan_again(question, order.running)
    measure_as_worker(order)
    planned = answer(question)
    plan = _job_plan(planned)
    if planned.solution is not None and order.simulation_s:
        return _with_simulation(plan, order, planned, folder)
    return plan


def question_of(order: PlanOrder, config: Any, marker: Path | None = None) -> PlanQuestion:
    """Builds the planner's question about a model.

    `config`: a transformers config. `marker`: a file to be there while blocks of the model are measured.
    """
    kept_times = None
    if order.kept_times_dir is not None:
        machine = order.hardware.model_dump(mode="json") | {"num_threads": order.compute_threads}
        kept_times = TimingCache(folder=order.kept_times_dir, machine=machine, is_alone=order.is_alone, marker=marker)
    device_is_present = order.hardware.gpus.count == 0 or torch.cuda.is_available()
    measures = order.may_measure and order.compute_threads is not None
    return PlanQuestion(
        config=config,
        hardware=order.hardware,
        training=order.training,
        chooses_microbatches=order.chooses_microbatches,
        lengths=_lengths_of(order),
        num_validation_examples=order.num_validation_examples,
        num_optimizers=order.num_optimizers,
        host_memory_nbytes=order.host_memory_nbytes,
        device_memory_nbytes=order.device_memory_nbytes,
        measures=measures and device_is_present,
        kept_times=kept_times,
    )


def _lengths_of(order: PlanOrder) -> ExampleLengths | None:
    if order.dataset_dir is None:
        return None
    training = order.training
    if order.chooses_microbatches:
        raise ValueError("num_microbatches is missing: with the job's data, it decides how wide micro-batches are")
    return example_lengths(
        order.dataset_dir,
        batch_size=training.batch_size,
        num_microbatches=training.num_microbatches,
        seed=training.seed,
        num_steps=training.total_steps,
    )


def measure_as_worker(order: PlanOrder) -> None:
    """Configures this process to compute like a job's GPU worker, if it is to measure."""
    if order.compute_threads is not None:
        torch.set_num_threads(order.compute_threads)
        if order.hardware.gpus.count == 0:
            retain_freed_memory()


def _plan_again(question: PlanQuestion, request: ReplanRequest) -> JobPlan:
    profiles = Profiles(question)
    is_cpu = question.hardware.gpus.count == 0
    steps = load_measured(
        request.timeline_dir,
        profiles.layout,
        first_step=request.first_step,
        shares_cores=is_cpu,
        read_to_write=question.speeds.ssd_read_bytes / question.speeds.ssd_write_bytes,
    )
    if len(steps) < MIN_STEPS:
        raise RuntimeError(
            f"spans of {len(steps)} steps from step {request.first_step} on are stored; {MIN_STEPS} are needed"
        )
    corrected = correct(question, profiles, _running_job(request), steps)
    plan = _job_plan(corrected.planned)
    changes: dict[str, Any] = {"changes": corrected.changes, "message": corrected.in_words}
    if not corrected.changes:
        changes |= {"placement": request.plan.placement, "arena_nbytes": request.plan.arena_nbytes}
    return plan.model_copy(update=changes)


def _running_job(request: ReplanRequest) -> RunningJob:
    """Describes the running job. Raises RuntimeError if its plan lacks values, as a plan of an older release may."""
    plan, report = request.plan, request.plan.report
    if plan.placement is None or plan.arena_nbytes is None:
        raise RuntimeError("the job's plan has no placement")
    if report.choices is None or report.bound_s is None or report.busy_s is None or report.peak_gib is None:
        raise RuntimeError("the job's plan lacks predicted values")
    return RunningJob(
        placement=plan.placement,
        arena_nbytes=plan.arena_nbytes,
        spills_grads=report.choices["kept_grads_on_ssd"] > 0,
        step_s=report.bound_s,
        compute_s=report.busy_s["compute"],
        peak_gib=report.peak_gib,
        num_steps_left=request.num_steps_left,
        restart_s=request.restart_s,
    )


def _job_plan(planned: Planned) -> JobPlan:
    if (solution := planned.solution) is None:
        return JobPlan(report=planned.report)
    return JobPlan(report=planned.report, placement=solution.placement, arena_nbytes=solution.plan.arena_nbytes)


def _with_simulation(plan: JobPlan, order: PlanOrder, planned: Planned, folder: Path) -> JobPlan:
    """Simulates the plan with queues and waits. Adds the step's time and summary, or a warning on failure."""
    assert planned.solution is not None, "it fits"
    assert planned.layout is not None, "there is such a model"
    num_cores = len(os.sched_getaffinity(0))
    try:
        simulated = simulate_planned(planned.solution, planned.layout, num_cores=num_cores, limit_s=order.simulation_s)
    except TooLong:
        why = f"it takes longer than {order.simulation_s:g} s"
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


def main() -> None:
    """Writes {"ok": true, ...} or {"ok": false, "error": {code, message, param}}. The exit code is 0.

    The first form has a plan, or warnings if no plan could be made.
    """
    parser = argparse.ArgumentParser(description="Plan a job.")
    parser.add_argument("--question", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--measuring", type=Path, help="a file to be there while blocks of the model are measured")
    options = parser.parse_args()
    try:
        order = PlanOrder.model_validate_json(options.question.read_text())
        if order.running is not None:
            os.nice(NICENESS_BESIDE_COMPUTE)
        result: dict[str, Any] = {"ok": True, **plan_job(order, options.result.parent, options.measuring).to_json()}
    except UnsupportedArchitectureError as error:
        result = _refusal("model_not_supported", str(error))
    except (DatasetError, RuntimeError, MemoryError) as error:
        # For example, operators whose output shapes depend on the data. The job then runs without a plan.
        result = {"ok": True, "warnings": [f"no plan was made: {type(error).__name__}: {error}"]}
    except (OSError, ValueError) as error:
        result = _refusal("invalid_model", f"the model folder cannot be read: {error}")
    options.result.write_text(json.dumps(result))


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {"ok": False, "error": {"code": code, "message": message, "param": "model"}}


if __name__ == "__main__":
    main()
