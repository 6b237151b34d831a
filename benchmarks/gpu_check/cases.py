"""The list of the check's cases, in the order in which they run. Loads no torch."""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.gpu_check.case import Case
from benchmarks.peers.schedules import System
from benchmarks.peers.workload import ModelShape
from windlass.amounts import GIB
from windlass.storage.ids import Formats, Precision, StatePrecision

SHAPES = {
    "0.5B": ModelShape(
        hidden=896,
        num_layers=24,
        vocab=151936,
        intermediate=4864,
        num_heads=14,
        num_key_value_heads=2,
        is_tied=True,
    ),
    "1.5B": ModelShape(
        hidden=1536,
        num_layers=28,
        vocab=151936,
        intermediate=8960,
        num_heads=12,
        num_key_value_heads=2,
        is_tied=True,
    ),
    "3B": ModelShape(
        hidden=2048,
        num_layers=36,
        vocab=151936,
        intermediate=11008,
        num_heads=16,
        num_key_value_heads=2,
        is_tied=True,
    ),
    "7B": ModelShape(
        hidden=3584,
        num_layers=28,
        vocab=152064,
        intermediate=18944,
        num_heads=28,
        num_key_value_heads=4,
    ),
}
TINY = ModelShape(hidden=64, num_layers=3, vocab=128, intermediate=128, num_heads=4, num_key_value_heads=2)
_TINY_TOKENS = 512  # of a step
# Bytes that a 24 GB card leaves to torch.
CAP_NBYTES = 45 * GIB // 2
# Rates of a usual machine, for the estimate of a case's time.
_FLOPS = 100e12
_LOADED_PARAMS_PER_S = 80e6
_SSD_BYTES_PER_S = 2e9
START_S = 60.0  # to begin, to time single blocks, and to time the same model without transfers
MOST_S = 420.0  # of a case: deeper models are not trained
NUM_STEPS = 6  # of a speed case: one to warm up, three timed, one whose waits are counted, one traced


class States(StrEnum):
    """The tier of all model states."""

    SSD = "ssd"
    HOST = "host"  # only there: the job has no SSDs and writes no checkpoints


@dataclass(frozen=True, slots=True)
class LinkCase:
    """The rates of the machine's parts, from which all later predictions follow."""

    name: str = "link"
    part: str = "link"
    expected_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ParityCase:
    """Training in one precision, with every choice for activations and every tier of states.

    Or with lanes, several GPU workers and several boxes. All of them compute on the one GPU, in streams of their own.
    """

    precision: Precision
    has_several: bool = False
    part: str = "parity"
    expected_s: float = 150.0

    @property
    def name(self) -> str:
        """See Case."""
        return f"parity-{self.precision}{'-several' if self.has_several else ''}"


@dataclass(frozen=True, slots=True)
class PeerCase:
    """DeepSpeed on the same GPU with the same memory limit."""

    schedule: System
    part: str = "peers"
    expected_s: float = 180.0

    @property
    def name(self) -> str:
        """See Case."""
        return f"deepspeed-{self.schedule}"

    @property
    def states(self) -> States:
        """The tier of params and states."""
        return States.SSD if self.schedule is System.ZERO_INFINITY else States.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCase:
    """One training run with random weights and random tokens: bf16, AdamW, no clipping."""

    model: str
    shape: ModelShape
    states: States
    batch_size: int
    sequence_length: int = 1024
    num_microbatches: int = 1
    has_cap: bool = True  # GPU memory is that of a 24 GB card; else all of the GPU's
    state_precision: StatePrecision = StatePrecision.FP32
    schedule: System | None = None  # imitates this schedule
    part: str = "speed"

    @property
    def name(self) -> str:
        """See Case: "speed-7B-host-16", with "-all" if all of the GPU's memory is used."""
        name = f"speed-{self.model}-{self.states}-{self.batch_size}{'' if self.has_cap else '-all'}"
        return name if self.schedule is None else f"{name}-as-{self.schedule}"

    @property
    def num_tokens(self) -> int:
        """The tokens of a step."""
        return self.batch_size * self.sequence_length

    @property
    def microbatch(self) -> tuple[int, int]:
        """The examples and tokens of a micro-batch."""
        return self.batch_size // self.num_microbatches, self.sequence_length

    @property
    def state_nbytes(self) -> int:
        """The bytes of all model states."""
        return sum(Formats(Precision.BF16, self.state_precision).itemsizes.values()) * self.shape.num_params

    @property
    def load_s(self) -> float:
        """The seconds until the first step."""
        written_nbytes = self.state_nbytes if self.states is States.SSD else 0
        return self.shape.num_params / _LOADED_PARAMS_PER_S + written_nbytes / _SSD_BYTES_PER_S

    @property
    def expected_s(self) -> float:
        """See Case. Fewer layers take less."""
        moved_nbytes = 2 * self.state_nbytes if self.states is States.SSD else 0
        # Two operations a parameter and token forward, four backward, two for recomputation.
        compute_s = 8 * self.shape.num_params * self.num_tokens / _FLOPS
        steps_s = NUM_STEPS * max(compute_s, moved_nbytes / _SSD_BYTES_PER_S)
        return min(MOST_S, START_S + self.load_s + steps_s)

    def with_num_layers(self, number: int) -> "SpeedCase":
        """Returns the case for a model with so many layers of the same width."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, num_layers=number))


def _speed(model: str, states: States, batch_size: int, **options: Any) -> SpeedCase:
    # Split states give the same results with 12 bytes a parameter instead of 14, so more layers fit.
    is_large = model == "7B" or states is States.SSD
    states_in = StatePrecision.SPLIT if is_large else StatePrecision.FP32
    return SpeedCase(
        model=model,
        shape=SHAPES[model],
        states=states,
        batch_size=batch_size,
        **({"state_precision": states_in} | options),
    )


def cases(*, is_tiny: bool = False) -> list[Case]:
    """Returns the cases. The first four answer most. With `is_tiny`, one of each kind, and small models."""
    ssd, host = States.SSD, States.HOST
    imitated = System.ZERO_INFINITY, System.ZERO_OFFLOAD
    listed: list[Case] = [
        LinkCase(),
        ParityCase(Precision.BF16),
        _speed("7B", host, 16),
        _speed("1.5B", ssd, 16),
        _speed("1.5B", host, 16),
        _speed("7B", ssd, 16),
        _speed("3B", host, 16),
        ParityCase(Precision.BF16, has_several=True),
        ParityCase(Precision.FP32),
        ParityCase(Precision.FP16),
        _speed("7B", host, 16, has_cap=False),
        _speed("0.5B", host, 16),  # plain training fits on a 24 GB card
        _speed("1.5B", host, 4),
        _speed("7B", host, 64, num_microbatches=4),
        _speed("3B", ssd, 16),
        _speed("1.5B", ssd, 256, num_microbatches=16),
        _speed("1.5B", host, 16, has_cap=False),
        *map(PeerCase, imitated),
        _speed("1.5B", ssd, 16, schedule=imitated[0]),
        _speed("1.5B", host, 16, schedule=imitated[1]),
    ]
    if not is_tiny:
        return listed
    kinds: dict[object, Case] = {}
    for case in listed:
        kinds.setdefault(_kind(case) if isinstance(case, SpeedCase) else case.name, case)
    return [_tiny(case) if isinstance(case, SpeedCase) else case for case in kinds.values()]


def _kind(case: SpeedCase) -> object:
    return case.states, case.schedule, case.has_cap, case.num_microbatches > 1


def _tiny(case: SpeedCase) -> SpeedCase:
    shape = dataclasses.replace(TINY, is_tied=case.shape.is_tied)
    num_microbatches = min(2, case.num_microbatches)
    return dataclasses.replace(
        case, shape=shape, sequence_length=_TINY_TOKENS // case.batch_size, num_microbatches=num_microbatches
    )
