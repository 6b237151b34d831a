"""All actors in one process: an attempt is cut off, and the next one gives the results of an undisturbed job."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cut_off import CutOff, cut_off_at_gradient, run_attempt
from tests.support.training import (
    exported_params,
    has_direct_io,
    journal_of,
    leftovers_of,
    losses_of,
    make_partition,
    make_spec,
)
from windlass.actors.job.context import SsdFacts
from windlass.actors.job.journal import METRICS, JournalRecord
from windlass.actors.job.spec import JobSpec
from windlass.actors.lifecycle.stop_request import StopRequest
from windlass.actors.messages import (
    CommitStore,
    ComputeBlocks,
    ExportModel,
    FlushBlock,
    GradReady,
    LoadModel,
    Message,
    RestoreStates,
    UpdateStep,
    WriteChunks,
)
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.scheduler.scheduler import PAUSED
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.storage.ids import ActorName, Attempt, ChunkKey, JobId, Precision
from windlass.storage.io.engines import DEFAULT_IO
from windlass.storage.ssd.volume import Volume

# Losses, params, trained tokens.
Result = tuple[list[float], dict[str, torch.Tensor], object]


def job(root: Path) -> JobSpec:
    return make_spec(
        root,
        precision=Precision.BF16,
        num_microbatches=2,
        clip_norm=0.5,
        dropout=0.1,
        total_steps=6,
        evaluate_every=2,
        checkpoint_every=2,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Result:
    spec = job(tmp_path_factory.mktemp("uninterrupted"))
    outcome = run_attempt(spec, 1)
    assert outcome is not None
    assert outcome["status"] == "succeeded"
    return losses_of(spec), exported_params(spec), outcome["trained_tokens"]


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([(LoadModel, 0)], marks=pytest.mark.long),
        pytest.param([(CommitStore, 0)], marks=pytest.mark.long),
        pytest.param([(UpdateStep, 1), (UpdateStep, 2)], marks=pytest.mark.long),
        pytest.param([(CommitStore, 3), (CommitStore, 3), (UpdateStep, 5)], marks=pytest.mark.long),
        [(ExportModel, 2), (ExportModel, 6)],
    ],
)
def test_the_same_model_whatever_cut_the_attempts_off(
    tmp_path: Path,
    uninterrupted: Result,
    cuts: list[tuple[type[Message], int]],
) -> None:
    spec = job(tmp_path)
    for number, cut in enumerate(cuts, start=1):
        assert run_attempt(spec, number, cut) is None
        assert leftovers_of(spec) != []
    outcome = run_attempt(spec, len(cuts) + 1)
    assert outcome is not None
    assert outcome["status"] == "succeeded"
    losses, params, trained_tokens = uninterrupted
    assert losses_of(spec) == losses
    for name, param in params.items():
        assert torch.equal(exported_params(spec)[name], param), name
    told = [record.data["fine_tuned_model_checkpoint"] for record in journal_of(spec) if record.kind == "checkpoint"]
    assert set(told) == {"out-step-2", "out-step-4", "out"}
    assert outcome["trained_tokens"] == trained_tokens
    assert leftovers_of(spec) == []


@pytest.mark.long
def test_an_attempt_goes_on_with_another_order_of_updates(tmp_path: Path) -> None:
    """Without clipping, each plan of a job chooses the order."""
    results = []
    for folder, orders in (("whole", []), ("cut", [UpdateOrder.KEPT, UpdateOrder.ACTIVE])):
        spec = job(tmp_path / folder).with_training(clip_norm=None, update_order=UpdateOrder.ACTIVE)
        for number, order in enumerate(orders, start=1):
            assert run_attempt(spec, number, (UpdateStep, 2 * number)) is None
            spec = spec.with_training(update_order=order)
        outcome = run_attempt(spec, len(orders) + 1)
        assert outcome is not None
        assert outcome["status"] == "succeeded"
        results.append((losses_of(spec), exported_params(spec)))
    (losses, params), (other_losses, others) = results
    assert losses == other_losses
    assert all(torch.equal(param, others[name]) for name, param in params.items())


def is_of_a_step(record: JournalRecord) -> bool:
    return record.kind == METRICS and "train_loss" in record.data


SPILLED = Placement(num_host_grad_blocks=1)
HOST = Placement(host_blocks=(0, 1, 2, 3, 4), commit_every=10)
MIXED = Placement(host_blocks=(1,), device_blocks=(0, 3), num_cached_params=5, commit_every=3)


def swapping(choice: ActivationChoice) -> Placement:
    return Placement(activations=choice.of_layers(3), host_activation_nbytes=8 << 20)


def run_attempt_until(spec: JobSpec, number: int, cut: tuple[type[Message], int] | None) -> dict[str, Any] | None:
    """As `run_attempt`. With a `GradReady`, the scheduler has heard of the first gradient of the step."""
    if cut is None or cut[0] is not GradReady:
        return run_attempt(spec, number, cut)
    with cut_off_at_gradient(cut[1]):
        return run_attempt(spec, number)


@pytest.mark.long
@pytest.mark.usefixtures("small_activation_slots")
@pytest.mark.parametrize(
    "attempts",
    [
        # Commits at the steps 2, 4 and 6 (for checkpoints), and at 3 if every third step is committed.
        pytest.param([(SPILLED, (GradReady, 3)), (SPILLED, (UpdateStep, 5)), (SPILLED, None)], marks=pytest.mark.long),
        pytest.param(
            [(HOST, (UpdateStep, 4)), (HOST, (FlushBlock, 4)), (HOST, (CommitStore, 6)), (HOST, None)],
            marks=pytest.mark.long,
        ),
        pytest.param(
            [(MIXED, (RestoreStates, 0)), (MIXED, (FlushBlock, 3)), (MIXED, (UpdateStep, 5)), (MIXED, None)],
            marks=pytest.mark.long,
        ),
        [(Placement(), (UpdateStep, 2)), (HOST, (UpdateStep, 4)), (SPILLED, (GradReady, 5)), (MIXED, None)],
        [
            (swapping(ActivationChoice.SWAP), (UpdateStep, 2)),
            (swapping(ActivationChoice.KEEP), (GradReady, 3)),
            (swapping(ActivationChoice.RECOMPUTE_SWAP_INPUT), (UpdateStep, 5)),
            (swapping(ActivationChoice.SWAP), None),
        ],
    ],
    ids=["spilled", "host", "mixed", "each attempt another", "each attempt with other activations"],
)
def test_attempt_resumes_with_states_in_any_tier(
    tmp_path: Path, uninterrupted: Result, attempts: list[tuple[Placement, tuple[type[Message], int] | None]]
) -> None:
    spec = job(tmp_path)
    for number, (placement, cut) in enumerate(attempts, start=1):
        outcome = run_attempt_until(dataclasses.replace(spec, placement=placement), number, cut)
        assert (outcome is None) == (cut is not None)
    losses, params, trained_tokens = uninterrupted
    # Steps that were not committed are trained and reported again.
    told = [(record.data["step"], record.data["train_loss"]) for record in journal_of(spec) if is_of_a_step(record)]
    assert set(told) == set(enumerate(losses, start=1))
    for name, param in params.items():
        assert torch.equal(exported_params(spec)[name], param), name
    assert outcome is not None
    assert outcome["trained_tokens"] == trained_tokens
    assert leftovers_of(spec) == []


@pytest.mark.usefixtures("small_activation_slots")
@pytest.mark.parametrize(
    "placements",
    [
        pytest.param((Placement(), HOST, SPILLED), marks=pytest.mark.long),
        pytest.param(
            (HOST, Placement(streamed_blocks=(1, 2, 3), streams_grads=True, streams_ends=True), MIXED),
            marks=pytest.mark.long,
        ),
        pytest.param((HOST, MIXED, Placement(group_size=1)), marks=pytest.mark.long),
        (
            dataclasses.replace(swapping(ActivationChoice.SWAP), group_size=1, ssd_activation_nbytes=8 << 20),
            Placement(streamed_blocks=(1, 2, 3), streams_grads=True),
            dataclasses.replace(MIXED, group_size=1, num_grad_buffers=1),
        ),
    ],
    ids=["host and spilled", "all in pieces", "mixed and groups", "swapped, pieces and buffers"],
)
def test_a_paused_attempt_is_followed_by_one_with_another_plan_and_no_step_is_trained_twice(
    tmp_path: Path, uninterrupted: Result, placements: tuple[Placement, ...]
) -> None:
    spec, direct = job(tmp_path), has_direct_io(tmp_path)
    statuses = []
    for number, placement in enumerate(placements, start=1):
        stop = StopRequest()

        def look(to: ActorName, message: Message, stop: StopRequest = stop, last_step: int = 2 * number) -> None:
            # In the last attempt that is the last step: too late for a pause.
            if isinstance(message, ComputeBlocks) and any(each.step == last_step for each in message.operations):
                stop.pause()

        again = dataclasses.replace(spec, attempt=Attempt(number), placement=placement)
        outcome = run_local(again, partition=make_partition(spec), direct=direct, on_message=look, stop=stop)
        statuses.append(outcome["status"])
    assert statuses == [PAUSED, PAUSED, "succeeded"]
    losses, params, trained_tokens = uninterrupted
    assert losses_of(spec) == losses
    for name, param in params.items():
        assert torch.equal(exported_params(spec)[name], param), name
    assert outcome["trained_tokens"] == trained_tokens
    assert leftovers_of(spec) == []


@pytest.mark.long
def test_a_resumed_job_keeps_the_weights_it_began_with(tmp_path: Path) -> None:
    """The kept weights determine where chunks are stored. The SSDs are measured again in between, and found equal."""
    spec = job(tmp_path)
    facts = tuple(SsdFacts(io=DEFAULT_IO, weight=weight) for weight in (1, 3))
    direct = has_direct_io(tmp_path)

    places: list[dict[ChunkKey, ActorName]] = []

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, WriteChunks):
            places[-1] |= {item.key: to for item in message.items}
        if isinstance(message, UpdateStep) and message.step == 2 and len(places) == 1:
            raise CutOff

    places.append({})
    with pytest.raises(CutOff):
        run_local(spec, partition=make_partition(spec), direct=direct, ssds=facts, on_message=look)
    places.append({})
    again = dataclasses.replace(spec, attempt=Attempt(2))
    assert run_local(again, partition=make_partition(spec), direct=direct, on_message=look)["status"] == "succeeded"
    assert places[0] == places[1]
    counts = Counter(places[0].values())
    assert abs(counts[ActorName("ssd-1")] - 3 * counts[ActorName("ssd-0")]) <= 3


@pytest.mark.long
def test_another_number_of_ssds_is_refused_for_a_job_that_has_begun_and_right_for_the_next(tmp_path: Path) -> None:
    spec = job(tmp_path)
    assert run_attempt(spec, 1, (UpdateStep, 2)) is None
    fewer = dataclasses.replace(spec, ssd_dirs=spec.ssd_dirs[:1])
    with pytest.raises(Exception, match=r"laid out for other settings \(ssd_weights \(1, 1\), now \(1,\)\)"):
        run_attempt(fewer, 2)
    (tmp_path / "next").mkdir()
    following = dataclasses.replace(fewer, job=JobId(f"{spec.job}-next"), job_dir=str(tmp_path / "next"))
    outcome = run_attempt(following, 1)
    assert outcome is not None
    assert outcome["status"] == "succeeded"


@pytest.mark.long
def test_each_attempt_has_the_room_for_activations_that_its_plan_says(tmp_path: Path, uninterrupted: Result) -> None:
    spec = job(tmp_path)
    direct = has_direct_io(Path(spec.model_dir))
    for number, num_slots in enumerate((7, 7, 12, 0), start=1):
        placed = dataclasses.replace(spec, placement=Placement(ssd_activation_nbytes=num_slots << 20))
        assert run_attempt(placed, number, (CommitStore, number)) is None
        volumes = [Volume.open(name, direct=direct) for name in spec.ssd_dirs]
        held = [part.count for volume in volumes for part in volume.allocation(spec.job).scratch]
        for volume in volumes:
            volume.close()
        assert sum(held) == num_slots
    placed = dataclasses.replace(spec, placement=Placement(ssd_activation_nbytes=3 << 20))
    outcome = run_attempt(placed, 5)
    assert outcome is not None
    assert outcome["status"] == "succeeded"
    assert losses_of(spec) == uninterrupted[0]
    assert leftovers_of(spec) == []
