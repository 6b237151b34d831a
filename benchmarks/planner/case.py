"""Jobs on this machine that are planned. Predictions are written to disk before a job runs."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import ModelShape, Workload, model_config
from benchmarks.planner.run import JOB_FILE
from benchmarks.reporting.machine import num_cores
from windlass.amounts import GIB
from windlass.engine.memory_plan import ACTIVATION_SLOT_NBYTES, EVERY_OPERATOR, MemoryTier
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import ActivationOption, LayerProfile, Ways, ways_of_layer
from windlass.planner.feasibility import with_part
from windlass.planner.hardware import Hardware
from windlass.planner.planning.simulated_search import fastest_plan
from windlass.planner.question import JobPlan, PlanQuestion, Profiles, choices_of, report_of
from windlass.planner.simulation import simulated_step_s
from windlass.planner.solver import PlannedJob, limits_of

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job and its budgets in MiB. None: all that the machine has."""

    title: str
    hidden: int
    num_layers: int
    batch_size: int
    sequence_length: int
    num_microbatches: int = 1
    clip_norm: float | None = None
    device_mib: int | None = None
    memory_mib: int | None = None  # budget of the device and the arena together
    # Every layer swaps its input and the outputs of so many operators, if it has them; None: as the planner chooses.
    num_swapped: int | None = None

    def workload(self, *, num_timed_steps: int) -> Workload:
        """Returns the workload of the job."""
        return Workload(
            shape=ModelShape(
                hidden=self.hidden,
                num_layers=self.num_layers,
                vocab=4096,
                intermediate=self.hidden * 11 // 4,
                num_heads=self.hidden // 64,
            ),
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            num_warmup_steps=2,
            num_timed_steps=num_timed_steps,
            num_threads=num_cores(),
            seed=1,
        )


def only(number: int | None) -> Ways:
    """Restricts all layers to swapping their input and the outputs of `number` operators."""

    def ways(layer: LayerProfile) -> Iterable[ActivationOption]:
        of_layer = list(ways_of_layer(layer))
        if number is None:
            return [way for way in of_layer if way.choice.swapped == {EVERY_OPERATOR}]
        swapping = [way for way in of_layer if way.choice.recompute and not way.choice.kept]
        most = max(len(way.choice.swapped) for way in swapping)
        return [way for way in swapping if len(way.choice.swapped) == min(number, most)]

    return ways


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The predictions. Bytes of the device are those that the engine allocates."""

    step_s: float  # simulated, but at least the bound
    bound_s: float  # lower bound by the cost model
    simulated_s: float
    device_nbytes: int
    arena_nbytes: int
    ssd_nbytes: int
    swapped_nbytes: int  # space for activations that leave the device
    choices: dict[str, Any]  # see `planner.planning.report`


def question_of(case: Case, machine: Hardware) -> PlanQuestion:
    """Builds the planner's question. The blocks' times will be measured on this machine."""
    if case.memory_mib is not None:
        # The budget, plus what the planner leaves to processes.
        gib = case.memory_mib / 1024 + machine.host.memory_gib - limits_of(machine).host_nbytes / GIB
        machine = with_part(machine, host=with_part(machine.host, memory_gib=gib))
    return PlanQuestion(
        config=model_config(case.workload(num_timed_steps=1).shape, case.sequence_length),
        hardware=machine,
        training=TrainingConfig(
            batch_size=case.batch_size,
            sequence_length=case.sequence_length,
            num_microbatches=case.num_microbatches,
            clip_norm=case.clip_norm,
            total_steps=1,
        ),
        device_memory_nbytes=None if case.device_mib is None else case.device_mib * MIB,
        measures=True,
        ways=ways_of_layer if case.num_swapped is None else only(case.num_swapped),
    )


def predict(
    case: Case, question: PlanQuestion, profiles: Profiles, folder: Path, kernel_dir: Path
) -> tuple[Predicted, PlannedJob]:
    """Plans a job, and writes the plan and the prediction to its folder, beside its workload.

    Returns the prediction, and the job with the times of its blocks.

    Raises:
        DoesNotFitError: nothing fits.
    """
    job, solution, step_s = fastest_plan(question, profiles)
    assert step_s is not None, "there is a model"
    predicted = Predicted(
        step_s=step_s,
        bound_s=solution.step_s,
        simulated_s=simulated_step_s(solution, profiles.layout, num_cores=num_cores()),
        device_nbytes=solution.nbytes[MemoryTier.DEVICE],
        arena_nbytes=solution.plan.arena_nbytes,
        ssd_nbytes=solution.plan.ssd_nbytes + solution.plan.num_ssd_activations * ACTIVATION_SLOT_NBYTES,
        swapped_nbytes=solution.placement.host_activation_nbytes + solution.placement.ssd_activation_nbytes,
        choices=choices_of(job, solution),
    )
    plan = JobPlan(
        report=report_of(job, solution, is_cpu=question.hardware.gpus.count == 0, step_s=step_s),
        placement=solution.placement,
        arena_nbytes=solution.plan.arena_nbytes,
    )
    planned = {
        "num_microbatches": case.num_microbatches,
        "clip_norm": case.clip_norm,
        "job_plan": plan.to_json(),
        "kernel_dir": str(kernel_dir),
        "predicted": asdict(predicted),
    }
    (folder / JOB_FILE).write_text(json.dumps(planned))
    return predicted, job
