"""Plans a speed case and predicts its step time, by the planner's cost model and the rates measured in the same run.

`python -m benchmarks.gpu_check.prediction RESULTS PLANS` predicts by simulation instead. It needs pydantic, so it may
run on another machine, with the results file of this one. `--plan PLANS` shows its predictions beside new measurements.
"""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu_check.case import NotHereError, ResultsFile
from benchmarks.gpu_check.cases import CAP_NBYTES, MOST_S, NUM_STEPS, START_S, SpeedCase, States, cases
from benchmarks.peers.schedules import System
from benchmarks.peers.workload import model_config
from tests.support.training import TRAINING
from windlass.amounts import GIB
from windlass.engine.memory_estimate import TracedFacts, device_need
from windlass.engine.memory_plan import (
    ACTIVATION_SLOT_NBYTES,
    ActivationChoice,
    DeviceNeed,
    MemoryTier,
    Placement,
    PlanError,
    UpdateOrder,
    allocatable_nbytes,
)
from windlass.engine.model import Partition, build_meta_model
from windlass.engine.training_config import Initialization, TrainingConfig
from windlass.planner.cost import ActivationOption, AgainTimes, ModelProfile, Speeds, speeds_of, ways_of_layer
from windlass.planner.profiling import BlockTimes, Profiler, measure_blocks, with_times
from windlass.planner.solver import Limits, PlannedJob, Solution, StepCosts, largest, solution_of
from windlass.planner.solver.family import group_sizes
from windlass.storage.ids import Kernel, Precision

_FEW_LAYERS = 2  # of the model that is profiled; all layers are alike
_PROCESS_NBYTES = 6 * GIB  # of the process beside its arena
_USABLE = 0.95  # share of free memory and disk that a case may use
_HOST_NBYTES = 16 * GIB  # of the arena, where states are on the SSD
_TOTAL_STEPS = 1000  # more than there is time for, because a case ends when enough steps are timed
# Rates for the choice of a placement, where the link was not measured. Nothing is predicted from them.
_ASSUMED = {
    "gpus": {"count": 1, "memory_gib": 24, "tflops": 100},
    "host": {"memory_gib": 64, "memory_gb_per_s": 40, "adam_params_per_s": 1.5e9},
    "pcie": {"h2d_gb_per_s": 20, "d2h_gb_per_s": 20},
    "ssds": {"count": 1, "read_gb_per_s": 3, "write_gb_per_s": 2, "capacity_gib": 1000},
}
_UNUSED = 1e18  # bytes/s of SSDs that a job does not have
_OPTIONAL = {
    "gpus": {"fp32_tflops": None},
    "pcie": {"duplex_gb_per_s": None, "uplinks": None},
    "ssds": {"combined_gb_per_s": None, "cpu_s_per_gb": None},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The bytes that a case may use."""

    gpu_nbytes: int
    host_nbytes: int  # of an arena: the lesser of shared memory and of memory
    disk_nbytes: int

    @classmethod
    def of(cls, case: SpeedCase, gpu_nbytes: int, arena_nbytes: int, disk_nbytes: int) -> "Room":
        """Returns the room of a case on a machine with these bytes free."""
        host_nbytes = min(int(_USABLE * arena_nbytes), arena_nbytes - _PROCESS_NBYTES)
        return cls(
            gpu_nbytes=min(gpu_nbytes, CAP_NBYTES) if case.has_cap else int(_USABLE * gpu_nbytes),
            host_nbytes=min(host_nbytes, _HOST_NBYTES) if case.states is States.SSD else host_nbytes,
            disk_nbytes=int(_USABLE * disk_nbytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePlan:
    """The planned job of a case. `case` has as many layers as fit."""

    case: SpeedCase
    choice: ActivationChoice
    solution: Solution
    need: DeviceNeed
    layout: Any  # of the model's blocks

    @property
    def placement(self) -> Placement:
        """The places of states and activations."""
        return self.solution.placement

    @property
    def predicted(self) -> dict[str, Any]:
        """The closed form's prediction."""
        return {
            "step_s": self.solution.step_s,
            "num_layers": self.case.shape.num_layers,
            "bottleneck": self.solution.bottleneck,
            "gpu_gib": self.need.reserved_nbytes / GIB,
            "arena_gib": self.solution.nbytes[MemoryTier.HOST] / GIB,
        }


class Predictor:
    """Plans one case: profiles a few of its layers, measures their times if there is a device, and searches the depth.

    `hardware`: the mapping of a machine's profile (docs/hardware.md); None: rates of a usual machine.
    """

    def __init__(self, case: SpeedCase, hardware: Mapping[str, Any] | None, *, is_cpu: bool = False) -> None:
        self._case = case
        self._speeds = dataclasses.replace(speeds_of_profile(hardware or _ASSUMED), shares_cores=is_cpu)
        if case.states is States.HOST:  # nothing is written
            self._speeds = dataclasses.replace(self._speeds, ssd_read_bytes=_UNUSED, ssd_write_bytes=_UNUSED)
        few = case.with_num_layers(_FEW_LAYERS)
        self._config = model_config(few.shape, case.sequence_length)
        profiler = Profiler(self._config, Precision.BF16, for_gpu=not is_cpu)
        self.profile = profiler.profile(*case.microbatch)

    def measure(self, device: torch.device, *, max_s: float | None = None) -> dict[str, Any]:
        """Measures the times of the blocks, and returns them as JSON for `use`."""
        measured = measure_blocks(
            self.profile,
            self._config,
            Precision.BF16,
            device,
            sums_grads=self._case.num_microbatches > 1,
            grad_precision=training_of(self._case).grad_precision,
            max_s=max_s,
        )
        times = {str(block): dataclasses.asdict(times) for block, times in measured.times.items()}
        self.use(times)
        return times

    def use(self, times: Mapping[str, Any]) -> None:
        """Uses measured times of the blocks."""
        self.profile = with_times(self.profile, {int(block): _block_times(values) for block, values in times.items()})

    def plan(self, room: Room) -> CasePlan:
        """Returns the fastest placement of the deepest model that fits.

        Raises:
            NotHereError: not even one layer fits.
        """
        case, limits = self._case, _limits(room)

        def ways(number: int) -> list[tuple[ActivationChoice, Solution]]:
            return sorted(self._ways(number, limits), key=lambda way: way[1].step_s)

        number = largest(lambda each: bool(ways(each)), most=case.shape.num_layers)
        while number:
            deep = case.with_num_layers(number)
            partition = Partition(build_meta_model(model_config(deep.shape, case.sequence_length), Precision.BF16))
            facts = TracedFacts(partition)
            for choice, solution in ways(number):
                need = _need(deep, facts, solution)
                if need.reserved_nbytes <= room.gpu_nbytes:
                    return CasePlan(case=deep, choice=choice, solution=solution, need=need, layout=partition.layout)
            number = number * 3 // 4  # the exact count of device memory is larger than that of the closed form
        raise NotHereError(
            f"no layer of {case.model} fits: there is room for {room.gpu_nbytes / GIB:.1f} GiB on the GPU, "
            f"{room.host_nbytes / GIB:.1f} GiB in an arena and {room.disk_nbytes / GIB:.1f} GiB on the disk"
        )

    def _ways(self, num_layers: int, limits: Limits) -> Iterator[tuple[ActivationChoice, Solution]]:
        """Yields each choice for activations, with each size of a group of micro-batches, that fits and ends in time.

        An imitated schedule has one choice.
        """
        case = self._case.with_num_layers(num_layers)
        profile = self.profile.with_num_layers(num_layers)
        job = PlannedJob(model=profile, training=training_of(case))
        for group_size, choice in itertools.product(group_sizes(case.num_microbatches), ActivationChoice):
            if case.schedule is not None and (choice, group_size) != _imitated(case):
                continue
            way = _way_of(profile, choice)
            if way is None:
                continue
            costs = StepCosts(job=job, speeds=self._speeds, limits=limits, group_size=group_size)
            placement = _placement(case, choice, group_size, way.num_slots)
            try:
                solution = solution_of(costs, placement, int(limits.host_nbytes))
            except PlanError:
                continue
            # Again with the params that the arena has room for.
            solution = solution_of(costs, solution.placement, solution.plan.arena_nbytes)
            steps_s = START_S + case.load_s + NUM_STEPS * solution.step_s
            is_over = any(solution.nbytes[tier] > limits.by_tier[tier] for tier in _tiers(case))
            if not is_over and steps_s <= MOST_S:
                yield choice, solution


def speeds_of_profile(hardware: Mapping[str, Any]) -> Speeds:
    """Returns the rates of a machine's profile, without the validation that needs pydantic."""
    parts = {name: SimpleNamespace(**_OPTIONAL.get(name, {}) | values) for name, values in hardware.items()}
    machine: Any = SimpleNamespace(**parts)
    return speeds_of(machine)


def training_of(case: SpeedCase, kernel: Kernel | None = Kernel.FUSED) -> TrainingConfig:
    """Returns the training settings of a case."""
    training = dataclasses.replace(
        TRAINING,
        precision=Precision.BF16,
        clip_norm=None,
        batch_size=case.batch_size,
        num_microbatches=case.num_microbatches,
        sequence_length=case.sequence_length,
        state_precision=case.state_precision,
        kernel=kernel,
        total_steps=_TOTAL_STEPS,
        initialization=Initialization.RANDOM,
        evaluate_every=None,
        model_kernels=(),  # as in the runs that a case is compared with
    )
    imitates = case.schedule is not None
    return dataclasses.replace(training, update_order=UpdateOrder.AFTER_BACKWARD) if imitates else training


def _limits(room: Room) -> Limits:
    return Limits(
        device_nbytes=allocatable_nbytes(room.gpu_nbytes), host_nbytes=room.host_nbytes, ssd_nbytes=room.disk_nbytes
    )


def _tiers(case: SpeedCase) -> tuple[MemoryTier, ...]:
    """Returns the tiers that the case uses. Without SSDs the plan's bytes on them do not exist."""
    return (MemoryTier.DEVICE, MemoryTier.HOST, *((MemoryTier.SSD,) if case.states is States.SSD else ()))


def _imitated(case: SpeedCase) -> tuple[ActivationChoice, int]:
    """Returns the choice and group size of the imitated schedule."""
    if case.schedule is System.ZERO_INFINITY:
        return ActivationChoice.RECOMPUTE_SWAP_INPUT, 1
    return ActivationChoice.RECOMPUTE, case.num_microbatches


def _way_of(profile: ModelProfile, choice: ActivationChoice) -> ActivationOption | None:
    (policy,) = choice.of_layers(1)
    return next((way for way in ways_of_layer(profile.layers[0]) if way.choice == policy), None)


def _placement(case: SpeedCase, choice: ActivationChoice, group_size: int, num_slots: int) -> Placement:
    num_layers, is_host = case.shape.num_layers, case.states is States.HOST
    return Placement(
        host_blocks=tuple(range(num_layers + 2)) if is_host else (),
        num_cached_params=0 if is_host or case.schedule is not None else None,
        group_size=group_size,
        activations=choice.of_layers(num_layers),
        host_activation_nbytes=group_size * num_layers * num_slots * ACTIVATION_SLOT_NBYTES,
    )


def _need(case: SpeedCase, facts: TracedFacts, solution: Solution) -> DeviceNeed:
    training, (num_examples, num_tokens) = training_of(case), case.microbatch
    return device_need(
        facts,
        solution.plan,
        [case.microbatch] * solution.plan.group_size,
        formats=training.formats,
        grad_precision=training.grad_precision,
        num_microbatches=case.num_microbatches,
        num_ahead=solution.costs.job.num_prefetched,
        max_tokens=num_examples * num_tokens,
        head_slices=training.head_slices,
    )


def _block_times(values: Mapping[str, Any]) -> BlockTimes:
    again = values["again"]
    return BlockTimes(**{**values, "again": None if again is None else AgainTimes(**again)})


# --- by simulation, elsewhere -----------------------------------------------------------------------------------------


def simulated(results: ResultsFile, listed: list[SpeedCase]) -> dict[str, Any]:
    """Predicts each case by simulation with the rates, the room and the block times of a results file."""
    from windlass.planner.simulation import simulated_step_s  # needs pydantic

    found = results.read()
    link = found["link"].measured
    plans: dict[str, Any] = {}
    for case in listed:
        predictor = Predictor(case, link["hardware"], is_cpu=link["hardware"]["gpus"]["count"] == 0)
        if case.name in found and "block_times" in found[case.name].measured:
            predictor.use(found[case.name].measured["block_times"])
        try:
            plan = predictor.plan(Room.of(case, **link["room"]))
        except NotHereError:
            continue
        step_s = max(plan.solution.step_s, simulated_step_s(plan.solution, plan.layout, num_cores=link["num_cores"]))
        plans[case.name] = plan.predicted | {"step_s": step_s}
    return plans


def main(results: Path, plans: Path, make_cases: Callable[[], list[Any]] = cases) -> None:
    """Writes the simulated predictions of all speed cases."""
    listed = [case for case in make_cases() if isinstance(case, SpeedCase)]
    plans.write_text(json.dumps(simulated(ResultsFile(results), listed), indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
