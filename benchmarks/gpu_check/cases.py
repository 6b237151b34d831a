"""The models that the GPU check trains for speed: Qwen2.5's shapes, the tiers of their states, their activations."""

import dataclasses
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.activations.memory_need import room_for_activations
from benchmarks.peers.schedules import System, behaving_as
from benchmarks.peers.workload import ModelShape, model_config
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import GIB
from tests.support.training import make_spec
from windlass.actors.job import JobSpec
from windlass.engine.data.examples import FORMAT_VERSION, NO_TARGET
from windlass.engine.memory_plan import ActivationChoice, Placement
from windlass.engine.training_config import Initialization
from windlass.storage.ids import Formats, Kernel, Precision, StatePrecision

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
# More steps than there is time for, because a case ends when enough of them are timed.
_TOTAL_STEPS = 1000
_BATCHES = 4  # number of different batches
_DEADLINE_S = 120.0
# Rates that loading is sure to reach. They show in advance whether there is time for a case.
_LOADED_PARAMS_PER_S = 80e6
_WRITTEN_BYTES_PER_S = 1e9
_START_S = 15.0


RECOMPUTE, SWAP_INPUT = ActivationChoice.RECOMPUTE, ActivationChoice.RECOMPUTE_SWAP_INPUT


class States(StrEnum):
    """The tier of all model states."""

    SSD = "SSD"
    HOST = "host"  # only there: the job has no SSDs and writes no checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The memory limits of a case."""

    gpu_nbytes: int  # of the caching allocator
    host_nbytes: dict[States, int]  # of the arena


CAPS = Caps(gpu_nbytes=24 * GIB, host_nbytes={States.SSD: 16 * GIB, States.HOST: 104 * GIB})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCase:
    """One training run with random weights and random tokens: bf16, AdamW, no clipping."""

    model: str
    shape: ModelShape
    states: States
    batch_size: int
    sequence_length: int = 1024
    num_microbatches: int = 1
    activations: ActivationChoice = ActivationChoice.RECOMPUTE
    state_precision: StatePrecision = StatePrecision.FP32
    system: System | None = None  # imitates this system's schedule

    @property
    def name(self) -> str:
        """The unique name of the case: "7B host 16"."""
        name = f"{self.model} {self.states} {self.batch_size}"
        return name if self.system is None else f"{name} as {self.system}"

    @property
    def num_tokens(self) -> int:
        """The tokens of a step."""
        return self.batch_size * self.sequence_length

    @property
    def state_nbytes(self) -> int:
        """The bytes of all model states."""
        return sum(Formats(Precision.BF16, self.state_precision).itemsizes.values()) * self.shape.num_params

    @property
    def expected_s(self) -> float:
        """The maximum seconds before the first step, on a machine of usual speed."""
        num_params = self.shape.num_params
        written_nbytes = self.state_nbytes if self.states is States.SSD else 0
        return _START_S + num_params / _LOADED_PARAMS_PER_S + written_nbytes / _WRITTEN_BYTES_PER_S

    def spec(self, folder: Path, *, device: str, host_nbytes: int, kernel: Kernel | None, kernel_dir: Path) -> JobSpec:
        """Builds the job, with its model, data and SSD below `folder`."""
        folder.mkdir(parents=True)
        model_config(self.shape, self.sequence_length).save_pretrained(folder / "model")
        self._write_tokens(folder / "data")
        spec = make_spec(folder / "base", num_ssds=0, precision=Precision.BF16, clip_norm=None)
        spec = spec.with_training(
            batch_size=self.batch_size,
            num_microbatches=self.num_microbatches,
            sequence_length=self.sequence_length,
            state_precision=self.state_precision,
            kernel=kernel,
            total_steps=_TOTAL_STEPS,
            initialization=Initialization.RANDOM,
            evaluate_every=None,
        )
        spec = dataclasses.replace(
            spec,
            model_dir=str(folder / "model"),
            dataset_dir=str(folder / "data"),
            num_validation_examples=0,
            ssd_dirs=(str(folder / "ssd"),) if self.states is States.SSD else (),
            optimizer_threads=max(1, num_cores() - 2),
            kernel_dir=str(kernel_dir),
            host_memory_nbytes=host_nbytes,
            deadline_s=_DEADLINE_S,
        )
        is_host = self.states is States.HOST
        placement = Placement(
            host_blocks=tuple(range(self.shape.num_layers + 2)) if is_host else (),
            num_cached_params=0 if is_host else None,
            activations=self.activations.of_layers(self.shape.num_layers),
        )
        placement = dataclasses.replace(placement, host_activation_nbytes=room_for_activations(spec, placement, device))
        spec = dataclasses.replace(spec, placement=placement)
        return spec if self.system is None else behaving_as(spec, self.system, self.shape.num_layers + 2)

    def _write_tokens(self, folder: Path) -> None:
        folder.mkdir()
        num_examples, length = self.batch_size * _BATCHES, self.sequence_length
        tokens = np.random.default_rng(0).integers(0, self.shape.vocab, (num_examples, length), dtype=np.int32)
        targets = np.roll(tokens, -1, axis=1)
        targets[:, -1] = NO_TARGET
        tokens.tofile(folder / "train.tokens")
        targets.tofile(folder / "train.targets")
        np.arange(0, tokens.size + 1, length, dtype=np.int64).tofile(folder / "train.offsets")
        counts = {
            "num_tokens": tokens.size,
            "num_examples": num_examples,
            "num_targets": int((targets != NO_TARGET).sum()),
        }
        meta = {"version": FORMAT_VERSION, "sequence_length": length, "splits": {"train": counts}}
        (folder / "meta.json").write_text(json.dumps(meta))


def cases() -> list[SpeedCase]:
    """Returns the cases, the most valuable first, because time may run out."""

    def case(model: str, states: States, batch_size: int, **options: Any) -> SpeedCase:
        return SpeedCase(
            model=model,
            shape=SHAPES[model],
            states=states,
            batch_size=batch_size,
            **({"activations": SWAP_INPUT if batch_size > 8 else RECOMPUTE} | options),
        )

    # Split states give the same results with 12 bytes a parameter. With 14 bytes, fewer models fit into 128 GiB of
    # memory or 64 GiB of disk.
    large: dict[str, Any] = {"state_precision": StatePrecision.SPLIT}
    return [
        case("1.5B", States.HOST, 16),
        case("7B", States.HOST, 16, **large),
        case("1.5B", States.SSD, 16, **large),
        case("1.5B", States.SSD, 16, system=System.ZERO_INFINITY, **large),
        case("1.5B", States.HOST, 4),
        case("1.5B", States.HOST, 32),
        case("7B", States.HOST, 32, num_microbatches=2, **large),
        case("1.5B", States.SSD, 32, **large),
        case("1.5B", States.HOST, 16, system=System.ZERO_OFFLOAD, activations=RECOMPUTE),
        case("0.5B", States.SSD, 16),
        case("3B", States.HOST, 16),
        case("1.5B", States.SSD, 4, **large),
        case("1.5B", States.HOST, 8),
    ]


def tiny_cases() -> list[SpeedCase]:
    """Returns one case of each kind, with models that any machine can train."""
    kinds: dict[tuple[object, ...], SpeedCase] = {}
    for case in cases():
        kinds.setdefault((case.states, case.system, case.num_microbatches), case)
    return [
        dataclasses.replace(
            case,
            shape=ModelShape(
                hidden=64,
                num_layers=3,
                vocab=128,
                intermediate=128,
                num_heads=4,
                num_key_value_heads=2,
                is_tied=case.shape.is_tied,
            ),
            sequence_length=32,
        )
        for case in kinds.values()
    ]
