"""All actors in one process: activations kept, swapped or recomputed, and none left afterwards."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.schedules import System, behaving_as
from tests.support.cut_off import CutOff, cut_off_at_gradient
from tests.support.training import (
    exported_params,
    has_direct_io,
    journal_of,
    leftovers_of,
    losses_of,
    make_partition,
    make_spec,
    metrics_of,
)
from windlass.actors.activations import ssd_store as ssd_activations
from windlass.actors.activations import tiered_store as activation_tiers
from windlass.actors.activations.tiered_store import ActivationTiers
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import ComputeBlocks, Message, Phase, WriteActivations
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.activations.host_store import ActivationMemoryError
from windlass.engine.activations.store import NOTHING_SWAPPED, SwapCounts
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.device.streams import CpuStreams, Stream, ThreadStream
from windlass.engine.memory_estimate.activation_memory import ActivationNeedUnknownError
from windlass.engine.memory_plan.activation_policy import ActivationChoice, BlockActivations
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.queue_depths import QueueDepths
from windlass.engine.model.layout import UnsupportedArchitectureError
from windlass.storage.ids import ActorName, Attempt, Precision
from windlass.storage.memory.arena import SlotPool

NUM_LAYERS, HIDDEN = 3, 64
SWAP = ActivationChoice.SWAP.of_layers(NUM_LAYERS)
MIXED = (
    BlockActivations(swap_input=True, swapped=frozenset({"aten.mm.default"})),
    *ActivationChoice.KEEP.of_layers(1),
    *ActivationChoice.SWAP.of_layers(1),
)


class Watched:
    """The stores that a run opened, and their slots in host memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stores: list[ActivationTiers] = []
        self.pools: list[SlotPool] = []
        for module in (activation_tiers, ssd_activations):
            monkeypatch.setattr(module, "SlotPool", self._make_pool)
        monkeypatch.setattr(gpu_worker, "ActivationTiers", self._open)

    def _make_pool(self, *args: Any, **kwargs: Any) -> SlotPool:
        self.pools.append(SlotPool(*args, **kwargs))
        return self.pools[-1]

    def _open(self, *args: Any) -> ActivationTiers:
        self.stores.append(ActivationTiers(*args))
        return self.stores[-1]

    @property
    def counts(self) -> SwapCounts:
        """The counts of the only store that was opened. Checks that all of its slots are free."""
        (store,) = self.stores
        assert [pool.statistics.in_use_nbytes for pool in self.pools] == [0] * len(self.pools)
        assert store.counts.held_nbytes == 0
        if store.ssd_counts == NOTHING_SWAPPED:
            assert self.pools[0].statistics.high_water_nbytes >= store.counts.peak_held_nbytes
        return store.counts


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, small_activation_slots: int) -> Watched:
    return Watched(monkeypatch)


def placed(activations: Sequence[BlockActivations], host_nbytes: int = 4 << 20) -> Placement:
    return Placement(activations=tuple(activations), host_activation_nbytes=host_nbytes)


def job(root: Path, **changes: Any) -> JobSpec:
    options = {"total_steps": 3, "evaluate_every": None, "num_validation_examples": 0, "num_microbatches": 2}
    return make_spec(root, **(options | changes))


def run(spec: JobSpec, **options: Any) -> dict[str, Any]:
    direct = has_direct_io(Path(spec.model_dir))
    return run_local(spec, partition=make_partition(spec), poison_released=True, direct=direct, **options)


def test_layers_choose_for_themselves_and_nothing_else_changes(tmp_path: Path, watched: Watched) -> None:
    recomputed = job(tmp_path / "recomputed", dropout=0.1)
    assert run(recomputed)["status"] == "succeeded"
    assert watched.stores == []  # no slots are requested, and none are used
    swapped = job(tmp_path / "swapped", dropout=0.1, placement=placed(MIXED))
    assert run(swapped)["status"] == "succeeded"
    assert watched.counts.out_nbytes >= watched.counts.in_nbytes > 0
    for way, nbytes in (("out", watched.counts.out_nbytes), ("in", watched.counts.in_nbytes)):
        told = metrics_of(swapped, f"activation_bytes_{way}")
        assert list(told) == [1, 2, 3]
        assert sum(told.values()) == nbytes
        assert min(told.values()) > 0
        assert set(metrics_of(recomputed, f"activation_bytes_{way}").values()) == {0}
    assert losses_of(swapped) == losses_of(recomputed)
    expected = exported_params(recomputed)
    assert [name for name, param in exported_params(swapped).items() if not torch.equal(param, expected[name])] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "depths",
    [
        pytest.param(
            QueueDepths(params=7, states=5, staged_activations=40, leaving_nbytes=1 << 30), marks=pytest.mark.long
        ),
        QueueDepths(params=1, states=1, staged_activations=1, leaving_nbytes=0),
    ],
)
def test_deeper_and_shallower_buffers_change_no_result(tmp_path: Path, watched: Watched, depths: QueueDepths) -> None:
    """Down to one of each: transfers wait for a buffer."""
    recomputed = job(tmp_path / "recomputed")
    run(recomputed)
    placement = Placement(activations=SWAP, ssd_activation_nbytes=128 << 20, depths=depths)
    swapped = job(tmp_path / "swapped", placement=placement)
    assert run(swapped)["status"] == "succeeded"
    assert watched.counts.in_nbytes > 0
    assert losses_of(swapped) == losses_of(recomputed)


def test_swapped_activations_beyond_host_memory_go_to_ssds(tmp_path: Path, watched: Watched) -> None:
    recomputed = job(tmp_path / "recomputed", dropout=0.1)
    run(recomputed)
    placement = Placement(activations=SWAP, host_activation_nbytes=1 << 20, ssd_activation_nbytes=128 << 20)
    swapped = job(tmp_path / "swapped", dropout=0.1, placement=placement)
    asked: set[ActorName] = set()

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, WriteActivations):
            asked.add(to)

    assert run(swapped, on_message=look)["status"] == "succeeded"
    (store,) = watched.stores
    assert watched.counts.in_nbytes > store.ssd_counts.in_nbytes > 0
    assert asked == {"ssd-0", "ssd-1"}
    assert sum(metrics_of(swapped, "activation_bytes_out").values()) == watched.counts.out_nbytes
    assert losses_of(swapped) == losses_of(recomputed)
    expected = exported_params(recomputed)
    assert [name for name, param in exported_params(swapped).items() if not torch.equal(param, expected[name])] == []


@pytest.mark.long
def test_as_zero_infinity_each_layers_input_leaves_the_device(tmp_path: Path, watched: Watched) -> None:
    spec = job(tmp_path / "job", precision=Precision.BF16, placement=placed(()))
    spec = behaving_as(spec, System.ZERO_INFINITY, NUM_LAYERS + 2)
    assert run(spec)["status"] == "succeeded"
    dataset, hyper = PreparedDataset.open(spec.dataset_dir, "train"), spec.training
    batches = [dataset.batch(step, hyper.batch_size, hyper.num_microbatches, hyper.seed) for step in range(3)]
    num_tokens = sum(microbatch.input_ids.numel() for batch in batches for microbatch in batch)
    assert watched.counts.out_nbytes == watched.counts.in_nbytes == NUM_LAYERS * num_tokens * HIDDEN * 2


@pytest.mark.long
def test_the_evaluation_keeps_and_swaps_nothing(tmp_path: Path, watched: Watched) -> None:
    counts = []
    for evaluate_every in (None, 1):
        watched.stores, watched.pools = [], []
        options = {"evaluate_every": 1, "num_validation_examples": 7} if evaluate_every else {}
        spec = job(tmp_path / f"every-{evaluate_every}", placement=placed(SWAP), **options)
        assert run(spec)["status"] == "succeeded"
        counts.append((watched.counts.out_nbytes, watched.counts.in_nbytes))
    assert counts[0] == counts[1]


@pytest.mark.long
@pytest.mark.usefixtures("unchecked_activations")
def test_skipped_steps_leave_nothing(tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    cross_entropy = torch.nn.functional.cross_entropy

    def overflow(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = cross_entropy(*args, **kwargs) * float("inf")
        return loss

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", overflow)
    spec = job(tmp_path / "job", precision=Precision.FP16, placement=placed(SWAP))
    assert run(spec)["status"] == "succeeded"
    assert watched.counts.in_nbytes > 0


@pytest.mark.short("True")
@pytest.mark.parametrize("at_head", [True, False])
def test_a_stop_in_the_middle_of_a_step_leaves_nothing(tmp_path: Path, watched: Watched, at_head: bool) -> None:
    """As the head is granted, or as the scheduler hears of the last layer's gradient."""

    def look(to: ActorName, message: Message) -> None:
        operations = message.operations if isinstance(message, ComputeBlocks) else ()
        if any((each.step, each.phase) == (2, Phase.HEAD) for each in operations):
            raise CutOff

    spec = job(tmp_path / "job", placement=placed(SWAP))
    if at_head:
        with pytest.raises(CutOff):
            run(spec, on_message=look)
    else:
        with cut_off_at_gradient(2, NUM_LAYERS), pytest.raises(CutOff):
            run(spec)
    assert watched.counts.out_nbytes > 0


class FailingStream(ThreadStream):
    """A stream whose link fails after a while."""

    num_copies = 0

    def run(self, work: Callable[[], object]) -> None:
        def copy() -> None:
            self.num_copies += 1
            if self.num_copies > 40:
                raise RuntimeError("the link is down")
            work()

        super().run(copy)


@pytest.mark.short("out")
@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails_ends_the_attempt_and_leaves_nothing(
    tmp_path: Path, watched: Watched, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_stream, opened = CpuStreams.open, []

    def open_failing(self: CpuStreams) -> Stream:
        opened.append("in" if opened else "out")
        return FailingStream(self._token, self._start_threads) if opened[-1] == way else open_stream(self)

    monkeypatch.setattr(CpuStreams, "open", open_failing)
    spec = job(tmp_path / "job", placement=placed(SWAP))
    outcome = run(spec)
    assert opened == ["out", "in"]
    assert outcome["status"] == "interrupted"  # another attempt may have a working one
    assert "gpu-0: RuntimeError: the link is down" in outcome["error"]["message"]
    assert watched.counts.out_nbytes > 0
    monkeypatch.setattr(CpuStreams, "open", open_stream)
    assert run(dataclasses.replace(spec, attempt=Attempt(2)))["status"] == "succeeded"
    assert leftovers_of(spec) == []


def test_kept_activations_need_no_slots(tmp_path: Path, watched: Watched) -> None:
    spec = job(tmp_path / "job", placement=placed(ActivationChoice.KEEP.of_layers(NUM_LAYERS), 0))
    assert run(spec)["status"] == "succeeded"
    assert watched.stores == []


@pytest.mark.long
def test_too_little_room_is_refused_before_the_first_step(
    tmp_path: Path, watched: Watched, small_activation_slots: int
) -> None:
    spec = job(tmp_path / "job", placement=placed(SWAP, 5 * small_activation_slots))
    with pytest.raises(ActivationMemoryError, match=r"has 5; give host_activation_nbytes \(now 20480\)") as info:
        run(spec)
    (enough,) = map(int, re.findall(r"at least (\d+)", str(info.value)))
    again = dataclasses.replace(spec, placement=placed(SWAP, enough))
    assert run(again)["status"] == "succeeded"
    assert watched.pools[-1].statistics.high_water_nbytes > enough // 2
    less = job(tmp_path / "less", placement=placed(SWAP, enough - small_activation_slots))
    with pytest.raises(ActivationMemoryError, match=rf"at least {enough},"):
        run(less)


def test_a_choice_that_is_wrong_for_the_model_is_refused_before_the_first_step(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[Any, set[BlockActivations]]] = []

    def refuse(config: Any, choices: set[BlockActivations], *_: bool) -> None:
        checked.append((config, choices))
        raise UnsupportedArchitectureError("it is not supported with activations swap")

    monkeypatch.setattr(gpu_worker, "check_architecture", refuse)
    spec = job(tmp_path / "job", placement=placed((MIXED[0], *ActivationChoice.RECOMPUTE.of_layers(1), MIXED[0])))
    with pytest.raises(UnsupportedArchitectureError):
        run(spec)
    ((config, choices),) = checked
    assert (config.hidden_size, choices) == (HIDDEN, {MIXED[0]})
    plain = job(tmp_path / "plain", placement=placed(ActivationChoice.RECOMPUTE.of_layers(NUM_LAYERS)))
    assert run(plain)["status"] == "succeeded"  # was checked when the job was prepared


def test_unpredictable_activation_memory_is_reported(tmp_path: Path, watched: Watched, monkeypatch: Any) -> None:
    def unknown(*_: Any) -> None:
        raise ActivationNeedUnknownError("how much room they need is not known")

    monkeypatch.setattr(gpu_worker, "require_activation_room", unknown)
    spec = job(tmp_path / "job", placement=placed(SWAP, 20480))
    outcome = run(spec)
    assert "is not known. If there are too few activation slots" in " ".join(
        record.message for record in journal_of(spec)
    )
    assert re.search(r"ActivationMemoryError: no room for .* raise host_activation_nbytes", outcome["error"]["message"])
    (pool,) = watched.pools
    assert pool.statistics.in_use_nbytes == 0


def test_operators_that_the_device_does_not_call_are_told(tmp_path: Path, watched: Watched) -> None:
    kept = BlockActivations(
        kept=frozenset({"aten.mm.default", "aten.mm.default#0", "aten.of_another_device.default#0"})
    )
    spec = job(tmp_path / "job", placement=placed((kept,) * NUM_LAYERS))
    assert run(spec)["status"] == "succeeded"
    (told,) = (record.message for record in journal_of(spec) if "results are recomputed" in record.message)
    assert "layers like block 1 do not call aten.of_another_device.default#0 on this device" in told
