"""Plans a job in a process of its own: `python -m windlass.actors.plan_job --question FILE --result FILE`."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from windlass.actors.planned_job import simulate_planned
from windlass.actors.planning import Planned, PlanQuestion, answer
from windlass.actors.simulation import Stuck, TooLong
from windlass.actors.spans_file import SIMULATED_FOLDER, keep_step
from windlass.engine.partition import UnsupportedArchitectureError, load_config
from windlass.planner import placement_json
from windlass.planner.hardware import Hardware
from windlass.storage.ids import Formats, Precision, StatePrecision


class PlanOrder(BaseModel):
    """What is asked, as it lies in a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path
    hardware: Hardware
    batch_size: int
    num_microbatches: int | None
    sequence_length: int
    precision: Precision
    state_precision: StatePrecision
    clips: bool
    num_optimizers: int
    host_memory_nbytes: int | None  # of the arena
    device_memory_nbytes: int | None
    compute_threads: int | None = None  # to measure with what the model's blocks take here; None: nothing is measured
    simulation_s: float = 0.0  # how long the simulation of what is planned may take; 0: there is none


def plan_job(order: PlanOrder, folder: Path) -> dict[str, Any]:
    """What people are told (`plan`), and, if it fits, what the engine does: `placement`, and `arena_nbytes` with it.

    Where it was simulated also `simulated`; the spans of a step go to `folder`.

    Raises:
        UnsupportedArchitectureError, OSError, ValueError: the model cannot be planned for.
    """
    fields = order.model_dump(exclude={"model_dir", "hardware", "compute_threads", "simulation_s"})
    if order.compute_threads is not None:
        torch.set_num_threads(order.compute_threads)
    planned = answer(
        PlanQuestion(
            config=load_config(order.model_dir),
            hardware=order.hardware,
            measures=order.compute_threads is not None,
            **fields,
        )
    )
    found: dict[str, Any] = {"plan": asdict(planned.report)}
    if (solution := planned.solution) is not None:
        # With less memory for the arena the placement is refused, with more other buffers grow.
        placement = placement_json.to_json(solution.placement)
        found |= {"placement": placement, "arena_nbytes": solution.plan.arena_nbytes}
        if order.simulation_s:
            found |= _simulated(order, planned, folder)
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
        return {"simulated": {"step_s": found.step_s, "summary": last.summary}}
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
        result: dict[str, Any] = {"ok": True, **plan_job(order, options.result.parent)}
    except UnsupportedArchitectureError as error:
        result = _refusal("model_not_supported", str(error))
    except (RuntimeError, MemoryError) as error:
        # Such as experts, whose shapes follow from the data: the job runs without a plan.
        result = {"ok": True, "warnings": [f"no plan was made: {type(error).__name__}: {error}"]}
    except (OSError, ValueError) as error:
        result = _refusal("invalid_model", f"the model folder cannot be read: {error}")
    options.result.write_text(json.dumps(result))


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {"ok": False, "error": {"code": code, "message": message, "param": "model"}}


if __name__ == "__main__":
    main()
