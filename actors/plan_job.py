"""Plans a job in a process of its own: `python -m windlass.actors.plan_job --question FILE --result FILE`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from windlass.actors.planning import PlanQuestion, answer
from windlass.engine.partition import UnsupportedArchitectureError, load_config
from windlass.planner import placement_json
from windlass.planner.hardware import Hardware
from windlass.storage.ids import Precision, StatePrecision


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


def plan_job(order: PlanOrder) -> dict[str, Any]:
    """What people are told (`plan`), and, if it fits, what the engine does: `placement`, and `arena_nbytes` with it.

    Raises:
        UnsupportedArchitectureError, OSError, ValueError: the model cannot be planned for.
    """
    fields = order.model_dump(exclude={"model_dir", "hardware", "compute_threads"})
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
    return found


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
        result: dict[str, Any] = {"ok": True, **plan_job(order)}
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
