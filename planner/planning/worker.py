"""Plans a job in a process of its own: `python -m windlass.planner.planning.worker --question FILE --result FILE`."""

import argparse
import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from windlass.actors.job import Optimizer
from windlass.actors.lifecycle import NICENESS_BESIDE_COMPUTE
from windlass.actors.timeline import SIMULATED_FOLDER, keep_step
from windlass.engine.data import DatasetError, example_lengths
from windlass.engine.device import retain_freed_memory
from windlass.engine.memory_plan import ExampleLengths, UpdateOrder, placement_json
from windlass.engine.model import UnsupportedArchitectureError, load_config
from windlass.planner.hardware import Hardware
from windlass.planner.planning.measured_steps import MIN_STEPS, load_measured
from windlass.planner.planning.planner import Planned, PlanQuestion, Profiles, answer
from windlass.planner.planning.replan import RunningJob, correct
from windlass.planner.profiling import TimingCache
from windlass.planner.simulation import Stuck, TooLong, simulate_planned
from windlass.storage.ids import Formats, Precision, StatePrecision


class RunningOrder(BaseModel):
    """A job that runs by a plan."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeline_dir: Path  # spans of its last steps
    first_step: int  # in steady state
    found: dict[str, Any]  # what was planned: see `plan_job`
    num_steps_left: int
    restart_s: float  # what another attempt costs


class DatasetOrder(BaseModel):
    """The prepared data that a job trains on, and in which order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset_dir: Path
    seed: int
    total_steps: int


class PlanOrder(BaseModel):
    """What is asked, as it lies in a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path
    hardware: Hardware
    batch_size: int
    num_microbatches: int | None
    sequence_length: int
    dataset: DatasetOrder | None = None  # with a number of micro-batches; None: examples are as long as they may be
    precision: Precision
    state_precision: StatePrecision
    optimizer: Optimizer = Optimizer.ADAMW
    clips: bool
    # As in a job's hyperparameters. Orders of older versions name neither: they were planned as the defaults.
    accumulation_precision: Precision = Precision.FP32
    update_order: UpdateOrder | None = None
    num_validation_examples: int = 0
    num_optimizers: int
    host_memory_nbytes: int | None  # of the arena
    device_memory_nbytes: int | None
    compute_threads: int | None = None  # of a GPU worker here; None: the hardware is elsewhere
    may_measure: bool = True  # what the model's blocks take, with these threads; else what is known counts
    kept_times_dir: Path | None = None  # of what was measured before; None: it is not kept
    is_alone: bool = False  # nothing else computes here
    simulation_s: float = 0.0  # how long the simulation of what is planned may take; 0: there is none
    running: RunningOrder | None = None  # to plan again by what it measured


_ASKED = {field.name for field in fields(PlanQuestion)} & PlanOrder.model_fields.keys() - {"hardware"}


def plan_job(order: PlanOrder, folder: Path) -> dict[str, Any]:
    """What people are told (`plan`), and, if it fits, what the engine does: `placement`, and `arena_nbytes` with it.

    Where it was simulated also `simulated`; the spans of a step go to `folder`. For a job that runs also whether that
    `changes`, and a line for people (`told`).

    Raises:
        UnsupportedArchitectureError, OSError, ValueError: the model cannot be planned for.
        DatasetError: the job's data is not there.
        RuntimeError: ... by shapes alone, or the job has not measured enough.
    """
    question = question_of(order, load_config(order.model_dir))
    if order.running is not None:
        return _plan_again(question, order.running)
    measure_as_worker(order)
    planned = answer(question)
    found = _in_json(planned)
    if planned.solution is not None and order.simulation_s:
        found |= _simulated(order, planned, folder)
    return found


def question_of(order: PlanOrder, config: Any) -> PlanQuestion:
    """What the planner is asked about a model. `config`: of transformers."""
    kept_times = None
    if order.kept_times_dir is not None:
        machine = order.hardware.model_dump(mode="json") | {"num_threads": order.compute_threads}
        kept_times = TimingCache(folder=order.kept_times_dir, machine=machine, is_alone=order.is_alone)
    is_there = order.hardware.gpus.count == 0 or torch.cuda.is_available()
    measures = order.may_measure and order.compute_threads is not None
    return PlanQuestion(
        config=config,
        hardware=order.hardware,
        measures=measures and is_there,
        lengths=_lengths_of(order),
        kept_times=kept_times,
        **order.model_dump(include=_ASKED),
    )


def _lengths_of(order: PlanOrder) -> ExampleLengths | None:
    if order.dataset is None:
        return None
    if order.num_microbatches is None:
        raise ValueError("how wide micro-batches are follows from their number: a question with data must name it")
    return example_lengths(
        order.dataset.dataset_dir,
        batch_size=order.batch_size,
        num_microbatches=order.num_microbatches,
        seed=order.dataset.seed,
        num_steps=order.dataset.total_steps,
    )


def measure_as_worker(order: PlanOrder) -> None:
    """Make this process compute as a job's GPU worker will, if it is to measure."""
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
        raise RuntimeError(f"of its steps from {order.first_step} on, {len(steps)} are held; {MIN_STEPS} are needed")
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
    found = _in_json(corrected.planned)
    if not corrected.changes:
        found |= {name: order.found[name] for name in ("placement", "arena_nbytes")}
    return {**found, "changes": corrected.changes, "told": corrected.in_words}


def _in_json(planned: Planned) -> dict[str, Any]:
    found: dict[str, Any] = {"plan": asdict(planned.report)}
    if (solution := planned.solution) is not None:
        # With less memory for the arena the placement is refused, with more other buffers grow.
        placement = placement_json.to_json(solution.placement)
        found |= {"placement": placement, "arena_nbytes": solution.plan.arena_nbytes}
    return found


def _simulated(order: PlanOrder, planned: Planned, folder: Path) -> dict[str, Any]:
    """What a step takes with queues and waits, and where its time goes; or why nobody knows."""
    assert planned.solution is not None, "it fits"
    assert planned.layout is not None, "there is such a model"
    formats, num_cores = Formats(order.precision, order.state_precision), len(os.sched_getaffinity(0))
    try:
        found = simulate_planned(
            planned.solution, planned.layout, formats, num_cores=num_cores, limit_s=order.simulation_s
        )
    except TooLong:
        why = f"it takes longer than {order.simulation_s:g} s"
    except (Stuck, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    else:
        last = found.steps[-1]
        keep_step(folder / SIMULATED_FOLDER, last)
        # What is promised, as everywhere: not less than by the cost model.
        return {"simulated": {"step_s": planned.report.step_s, "summary": last.summary}}
    return {"warnings": [f"the planned job was not simulated, so its steps may take longer than planned: {why}"]}


def main() -> None:
    """Writes {"ok": true, ...}, with a plan or with warnings, or {"ok": false, "error": {code, message, param}}; exit
    code 0.
    """
    parser = argparse.ArgumentParser(description="Plan a job.")
    parser.add_argument("--question", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    try:
        order = PlanOrder.model_validate_json(options.question.read_text())
        if order.running is not None:
            os.nice(NICENESS_BESIDE_COMPUTE)
        result: dict[str, Any] = {"ok": True, **plan_job(order, options.result.parent)}
    except UnsupportedArchitectureError as error:
        result = _refusal("model_not_supported", str(error))
    except (DatasetError, RuntimeError, MemoryError) as error:
        # Such as operators whose shapes follow from the data: the job runs without a plan.
        result = {"ok": True, "warnings": [f"no plan was made: {type(error).__name__}: {error}"]}
    except (OSError, ValueError) as error:
        result = _refusal("invalid_model", f"the model folder cannot be read: {error}")
    options.result.write_text(json.dumps(result))


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {"ok": False, "error": {"code": code, "message": message, "param": "model"}}


if __name__ == "__main__":
    main()
