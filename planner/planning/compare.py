"""Compares a job's plan with the step times of the papers' systems for the same job on the same machine."""

from dataclasses import dataclass, replace

from windlass.planner.baselines import POLICIES, ComparedSystem, compare
from windlass.planner.cost import ModelProfile
from windlass.planner.feasibility import with_part
from windlass.planner.hardware import Hardware
from windlass.planner.planning.planner import Planned
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.simulation import simulate_policy
from windlass.planner.solver import Solution
from windlass.storage.ids import Precision

_KIND = (
    "the others are simulated block by block; they get the whole batch at once, SSDs at full rate, fp32 states and the "
    "least memory"
)
_NO_CLIPPING = "systems that update within the backward pass cannot clip gradients, as this job does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The compared systems, and notes on how to read them.

    `systems` is empty if no comparison is possible. `notes` then gives the reason.
    """

    systems: tuple[ComparedSystem, ...]
    notes: tuple[str, ...]


def comparison(question: PlanQuestion, planned: Planned) -> Comparison:
    """Compares a planned job with the papers' systems, all with the compute rate that the plan assumes."""
    if question.training.precision is Precision.FP32:
        return Comparison(systems=(), notes=("nothing to compare: the papers' systems compute in 16 bit, not in fp32",))
    hardware = question.hardware
    if planned.solution is not None:
        hardware = _with_planned_tflops(hardware, planned.solution)
    try:
        whole_batch = Profiles(replace(question, measures=False)).of(
            question.training.batch_size, question.training.sequence_length
        )
        if question.num_layers is not None:
            whole_batch = whole_batch.with_num_layers(question.num_layers)
        systems = [_simulated(each, hardware, whole_batch) for each in compare(hardware, whole_batch)]
    except ValueError as error:
        return Comparison(systems=(), notes=(f"nothing to compare: {error}",))
    does_not_clip = question.training.clip_norm is not None and any(system.updates_in_backward for system in systems)
    return Comparison(systems=tuple(systems), notes=(_KIND, _NO_CLIPPING) if does_not_clip else (_KIND,))


def _simulated(system: ComparedSystem, hardware: Hardware, profile: ModelProfile) -> ComparedSystem:
    simulated = simulate_policy(POLICIES[system.system], hardware, profile)
    tokens_per_s = system.tokens_per_s * system.step_s / simulated.step_s
    return replace(system, step_s=simulated.step_s, gpu_share=simulated.gpu_share, tokens_per_s=tokens_per_s)


def _with_planned_tflops(hardware: Hardware, solution: Solution) -> Hardware:
    """Returns the machine with the compute rate that the plan assumes, which may come from measured times."""
    costs, model = solution.costs, solution.costs.job.model
    compute_s = sum(sum(costs.compute_s(block)) for block in model.blocks)
    return with_part(hardware, gpus=with_part(hardware.gpus, tflops=3 * model.num_flops / compute_s / 1e12))
