"""All actors in one process: settings that must not change a result do not change a bit of it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.training import exported_params, has_direct_io, losses_of, make_partition, make_spec, metrics_of
from windlass.actors.job.context import SsdFacts
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.training_config.training_config import Initialization
from windlass.storage.ids import Precision, Span
from windlass.storage.io.engines import Backend, IoSettings, uring_refusal
from windlass.storage.memory.arena import Arena, SlotPool, arena_path

Params = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    losses: list[float]
    validation_losses: dict[int, float]
    params: Params


def job(root: Path, *, num_ssds: int = 2, seed: int = 5, dropout: float = 0.0, num_cpu_optimizers: int = 1) -> JobSpec:
    """A job of six steps of the hardest kind: tied, clipped, bf16 masters and params, two micro-batches."""
    return make_spec(
        root,
        tied=True,
        dropout=dropout,
        num_ssds=num_ssds,
        num_cpu_optimizers=num_cpu_optimizers,
        precision=Precision.BF16,
        num_microbatches=2,
        clip_norm=0.5,
        seed=seed,
        total_steps=6,
        evaluate_every=None,
    )


def train(spec: JobSpec, *, poison_released: bool = True, ssds: tuple[SsdFacts, ...] | None = None) -> Result:
    direct = has_direct_io(Path(spec.model_dir).parent)
    outcome = run_local(spec, partition=make_partition(spec), poison_released=poison_released, direct=direct, ssds=ssds)
    assert outcome["status"] == "succeeded", outcome
    return Result(losses_of(spec), metrics_of(spec, "valid_loss"), exported_params(spec))


def assert_same(result: Result, expected: Result) -> None:
    assert result.losses == expected.losses
    assert result.validation_losses == expected.validation_losses
    for name, param in expected.params.items():
        assert torch.equal(result.params[name], param), name


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(job(tmp_path_factory.mktemp("baseline")))


@pytest.mark.long
def test_number_of_optimizers(tmp_path: Path, baseline: Result) -> None:
    assert_same(train(job(tmp_path, num_cpu_optimizers=2)), baseline)


@pytest.mark.short("3")
@pytest.mark.parametrize("num_ssds", [1, 3])
def test_number_of_ssds(tmp_path: Path, baseline: Result, num_ssds: int) -> None:
    assert_same(train(job(tmp_path, num_ssds=num_ssds)), baseline)


@pytest.mark.long
def test_device_buffers_kept_as_they_were(tmp_path: Path, baseline: Result) -> None:
    """The baseline fills released buffers with NaN."""
    assert_same(train(job(tmp_path), poison_released=False), baseline)


@pytest.mark.long
def test_arena_slots_filled_with_nan(tmp_path: Path, baseline: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots for params, gradients and optimizer states: nothing reads a released slot."""
    spec = job(tmp_path)
    filled: list[Span] = []
    release = SlotPool.release

    def fill_and_release(self: SlotPool, spans: Sequence[Span]) -> None:
        arena = Arena.open(arena_path(Path(spec.arena_dir), spec.job, spec.attempt))
        for span in spans:
            arena.buffer(span)[:] = b"\xff" * span.nbytes  # NaN in fp32 and in bf16
            filled.append(span)
        arena.close()
        release(self, spans)

    monkeypatch.setattr(SlotPool, "release", fill_and_release)
    assert_same(train(spec), baseline)
    assert len({span.offset for span in filled}) > 3


@pytest.mark.long
def test_dropout_repeats_with_its_seed(tmp_path: Path, baseline: Result) -> None:
    first = train(job(tmp_path / "first", dropout=0.2))
    assert first.losses[0] != baseline.losses[0]
    assert_same(train(job(tmp_path / "second", dropout=0.2)), first)


@pytest.mark.long
def test_random_initialization_repeats_with_its_seed(tmp_path: Path) -> None:
    results = []
    for name, seed in (("first", 5), ("second", 5), ("other", 6)):
        spec = job(tmp_path / name, seed=seed).with_training(initialization=Initialization.RANDOM)
        for weights in Path(spec.model_dir).glob("*.safetensors"):
            weights.unlink()
        results.append(train(spec))
    first, second, other = results
    assert_same(second, first)
    assert first.losses[-1] < first.losses[0]
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(other.params[weight], first.params[weight])


@pytest.mark.short("uring")
@pytest.mark.parametrize("backend", list(Backend))
def test_uneven_ssds_and_ways_to_move_bytes(tmp_path: Path, baseline: Result, backend: Backend) -> None:
    if backend is Backend.URING and (refusal := uring_refusal()) is not None:
        pytest.skip(refusal)
    depth = 3 if backend is Backend.URING else 1
    io = IoSettings(backend=backend, num_threads=3, depth=depth, piece_nbytes=1 << 20)
    facts = tuple(SsdFacts(io=io, weight=weight) for weight in (5, 2))
    assert_same(train(job(tmp_path), ssds=facts), baseline)
