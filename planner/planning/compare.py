"""A job's plan beside what the systems of the papers would take for the same job on the same machine."""

from dataclasses import dataclass, replace

from windlass.planner.baselines import POLICIES, ComparedSystem, compare
from windlass.planner.cost import ModelProfile
from windlass.planner.hardware import Hardware
from windlass.planner.planning.feasibility import with_part
from windlass.planner.planning.planner import Planned, PlanQuestion, Profiles
from windlass.planner.simulation import simulate_policy
from windlass.planner.solver import Solution
from windlass.storage.ids import Precision

_KIND = (
    "the others are simulated block by block; they get the whole batch at once, SSDs at full rate, fp32 states and the "
    "least memory"
)
_NO_CLIPPING = "what updates within the backward pass cannot clip gradients, as this job does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`systems` is empty where there is nothing to compare; `notes` then says why, else how to read them."""

    systems: tuple[ComparedSystem, ...]
    notes: tuple[str, ...]


def comparison(question: PlanQuestion, planned: Planned) -> Comparison:
    """Of a job that was planned. Compute is as fast for everybody: as fast as the plan counts with."""
    if question.precision is Precision.FP32:
        return Comparison(systems=(), notes=("nothing to compare: the papers' systems compute in 16 bit, not in fp32",))
    hardware = question.hardware
    if planned.solution is not None:
        hardware = _with_planned_tflops(hardware, planned.solution)
    try:
        whole_batch = Profiles(replace(question, measures=False)).of(question.batch_size, question.sequence_length)
        if question.num_layers is not None:
            whole_batch = whole_batch.with_num_layers(question.num_layers)
        systems = [_simulated(each, hardware, whole_batch) for each in compare(hardware, whole_batch)]
    except ValueError as error:
        return Comparison(systems=(), notes=(f"nothing to compare: {error}",))
    does_not_clip = question.clips and any(system.updates_in_backward for system in systems)
    return Comparison(systems=tuple(systems), notes=(_KIND, _NO_CLIPPING) if does_not_clip else (_KIND,))


def _simulated(system: ComparedSystem, hardware: Hardware, profile: ModelProfile) -> ComparedSystem:
    found = simulate_policy(POLICIES[system.system], hardware, profile)
    tokens_per_s = system.tokens_per_s * system.step_s / found.step_s
    return replace(system, step_s=found.step_s, gpu_share=found.gpu_share, tokens_per_s=tokens_per_s)


def _with_planned_tflops(hardware: Hardware, solution: Solution) -> Hardware:
    """As if the GPU did all operations at the rate at which it does the plan's, whose times may be measured ones."""
    costs, model = solution.costs, solution.costs.job.model
    compute_s = sum(sum(costs.compute_s(block)) for block in model.blocks)
    return with_part(hardware, gpus=with_part(hardware.gpus, tflops=3 * model.num_flops / compute_s / 1e12))
