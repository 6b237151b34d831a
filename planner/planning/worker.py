"""Plans a job in a process of its own: `python -m windlass.planner.planning.worker --question FILE --result FILE`."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from windlass.actors.lifecycle import NICENESS_BESIDE_COMPUTE
from windlass.actors.timeline import SIMULATED_FOLDER, keep_step
from windlass.engine.data import DatasetError, example_lengths
from windlass.engine.device import retain_freed_memory
from windlass.engine.memory_plan import ExampleLengths, placement_json
from windlass.engine.model import UnsupportedArchitectureError, load_config
from windlass.engine.training_config import TrainingConfig
from windlass.planner.hardware import Hardware
from windlass.planner.planning.measured_steps import MIN_STEPS, load_measured
from windlass.planner.planning.planner import Planned, PlanQuestion, Profiles, answer
from windlass.planner.planning.replan import RunningJob, correct
from windlass.planner.profiling import TimingCache
from windlass.planner.simulation import Stuck, TooLong, simulate_planned


class RunningOrder(BaseModel):
    """A running job and the plan that it runs with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeline_dir: Path  # spans of its last steps
    first_step: int  # in steady state
    found: dict[str, Any]  # the result of `plan_job` that the job runs with
    num_steps_left: int
    restart_s: float  # seconds that another attempt costs


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
    running: RunningOrder | None = None  # plan again with the measurements of a running job


def plan_job(order: PlanOrder, folder: Path, marker: Path | None = None) -> dict[str, Any]:
    """Plans a job. Returns the report as `plan` and, if the job fits, the engine's `placement` and `arena_nbytes`.

    A simulation adds `simulated`, and writes the spans of a step to `folder`. A running job adds `changes`, whether the
    plan is a new one, and `told`, a line for the user. `marker`: a file to be there while blocks are measured.

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
    result = _in_json(planned)
    if planned.solution is not None and order.simulation_s:
        result |= _simulated(order, planned, folder)
    return result


def question_of(order: PlanOrder, config: Any, marker: Path | None = None) -> PlanQuestion:
    """Builds the planner's question about a model.

    `config`: a transformers config. `marker`: a file to be there while blocks of the model are measured.
    """
    kept_times = None
    if order.kept_times_dir is not None:
        machine = order.hardware.model_dump(mode="json") | {"num_threads": order.compute_threads}
        kept_times = TimingCache(folder=order.kept_times_dir, machine=machine, is_alone=order.is_alone, marker=marker)
    is_there = order.hardware.gpus.count == 0 or torch.cuda.is_available()
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
        measures=measures and is_there,
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


def _plan_again(question: PlanQuestion, order: RunningOrder) -> dict[str, Any]:
    profiles = Profiles(question)
    is_cpu = question.hardware.gpus.count == 0
    steps = load_measured(
        order.timeline_dir,
        profiles.layout,
        first_step=order.first_step,
        shares_cores=is_cpu,
        read_to_write=question.speeds.ssd_read_bytes / question.speeds.ssd_write_bytes,
    )
    if len(steps) < MIN_STEPS:
        raise RuntimeError(
            f"spans of {len(steps)} steps from step {order.first_step} on are stored; {MIN_STEPS} are needed"
        )
    plan = order.found["plan"]
    running = RunningJob(
        placement=placement_json.from_json(order.found["placement"]),
        arena_nbytes=order.found["arena_nbytes"],
        spills_grads=plan["choices"]["kept_grads_on_ssd"] > 0,
        step_s=plan["bound_s"],
        compute_s=plan["busy_s"]["compute"],
        peak_gib=plan["peak_gib"],
        num_steps_left=order.num_steps_left,
        restart_s=order.restart_s,
    )
    corrected = correct(question, profiles, running, steps)
    result = _in_json(corrected.planned)
    if not corrected.changes:
        result |= {name: order.found[name] for name in ("placement", "arena_nbytes")}
    return {**result, "changes": corrected.changes, "told": corrected.in_words}


def _in_json(planned: Planned) -> dict[str, Any]:
    result: dict[str, Any] = {"plan": asdict(planned.report)}
    if (solution := planned.solution) is not None:
        # The arena needs exactly this size. With less the placement is refused; with more, other buffers grow.
        placement = placement_json.to_json(solution.placement)
        result |= {"placement": placement, "arena_nbytes": solution.plan.arena_nbytes}
    return result


def _simulated(order: PlanOrder, planned: Planned, folder: Path) -> dict[str, Any]:
    """Simulates the plan with queues and waits. Returns the step's time and summary, or a warning on failure."""
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
        return {"simulated": {"step_s": planned.report.step_s, "summary": last.summary}}
    return {"warnings": [f"the planned job was not simulated, so its steps may take longer than planned: {why}"]}


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
        result: dict[str, Any] = {"ok": True, **plan_job(order, options.result.parent, options.measuring)}
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
