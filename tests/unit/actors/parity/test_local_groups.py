"""All actors in one process: the same losses and params to the bit, for any size of accumulation groups."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.peers.schedules import System, behaving_as
from tests.support.actors.whole_jobs import Run, grouped
from tests.support.cut_off import CutOff
from tests.support.training import exported_params, has_direct_io, leftovers_of, make_partition, make_spec, metrics_of
from windlass.actors.gpu_worker.grad_accumulation import PartialGrads
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import ComputeBlocks, Message, Phase, SpanKind, SpansReported, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.activations.host_store import ActivationMemoryError
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.device.streams import Event
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.arena import layout as arena_layout
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.block_runner import BlockRunner
from windlass.storage.ids import ActorName, Attempt, Precision, StatePrecision

NUM_MICROBATCHES = 4
GROUP_SIZES = (1, 2, 3, 4)
# The fifth is the last of an epoch: it has two micro-batches, so some of its groups are empty.
NUM_STEPS = 6
# The model has five blocks.
PLACES = {
    "SSDs": Placement(num_cached_params=0),
    "some params stay": Placement(num_cached_params=7),
    "gradients on SSDs": Placement(num_host_grad_blocks=1),
    "host memory": Placement(host_blocks=(0, 1, 2, 3, 4), commit_every=3),
    "mixed": Placement(host_blocks=(1,), device_blocks=(0, 3), num_cached_params=2, commit_every=4),
    "one gradient on the device": Placement(num_cached_params=0, num_grad_buffers=1),
}


def job(root: Path, **changes: Any) -> JobSpec:
    options = {"num_microbatches": NUM_MICROBATCHES, "total_steps": NUM_STEPS, "evaluate_every": 3, "dropout": 0.1}
    return make_spec(root, **(options | changes))


def train(spec: JobSpec, **options: Any) -> None:
    direct = has_direct_io(Path(spec.model_dir))
    outcome = run_local(spec, partition=make_partition(spec), poison_released=True, direct=direct, **options)
    assert outcome["status"] == "succeeded", outcome
    assert leftovers_of(spec) == []


def run(root: Path, group_size: int | None, **changes: Any) -> Run:
    spec = grouped(job(root, **changes), group_size)
    train(spec)
    return Run.of(spec)


# Every precision, clipping and size occurs; `make test-long` runs all combinations, with every size.
QUICK = [
    (Precision.FP32, None, False, "one gradient on the device", 2),
    (Precision.BF16, None, True, "some params stay", 3),
    (Precision.FP16, 0.5, False, "gradients on SSDs", 1),
    (Precision.BF16, 0.5, True, "mixed", 3),
]
ALL = [
    case
    for case in product(Precision, (None, 0.5), (False, True), PLACES)
    if case[3] != "gradients on SSDs" or case[1] is not None or case[0] is Precision.FP16
]


@pytest.mark.short("fp16-0.5-False-gradients on SSDs-1")
@pytest.mark.parametrize(
    ("precision", "clip_norm", "tied", "place", "group_sizes"),
    [
        *(pytest.param(*case, (size,), id="-".join(map(str, (*case, size)))) for *case, size in QUICK),
        *(
            pytest.param(*case, GROUP_SIZES, marks=pytest.mark.long, id="-".join(map(str, (*case, "all"))))
            for case in ALL
        ),
    ],
)
def test_the_size_of_the_groups_changes_no_bit(
    tmp_path: Path,
    precision: Precision,
    clip_norm: float | None,
    tied: bool,
    place: str,
    group_sizes: tuple[int, ...],
) -> None:
    changes: dict[str, Any] = {
        "precision": precision,
        "clip_norm": clip_norm,
        "tied": tied,
        "placement": PLACES[place],
        # Then updates read params, too.
        "state_precision": StatePrecision.SPLIT if precision is Precision.BF16 else StatePrecision.FP32,
    }
    whole = run(tmp_path / "whole", None, **changes)
    for size in group_sizes:
        run(tmp_path / f"groups-of-{size}", size, **changes).assert_equals(whole)


@pytest.mark.long
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_sums_in_half_precision_go_on_where_they_were(tmp_path: Path, precision: Precision) -> None:
    """The sums of tied tensors are fp32 nevertheless."""
    changes = {"precision": precision, "accumulation_precision": precision, "tied": True}
    run(tmp_path / "groups", 1, **changes).assert_equals(run(tmp_path / "whole", None, **changes))


@pytest.mark.long
def test_steps_that_are_skipped_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only the first group had an infinity, and the last ones are finite."""
    broken = set[int]()
    cross_entropy = F.cross_entropy

    def break_some(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = cross_entropy(logits, targets, **options)
        return loss * float("inf") if int(targets.clamp(min=0).sum()) in broken else loss

    monkeypatch.setattr(F, "cross_entropy", break_some)
    found = []
    for size in (None, 1, 3):
        spec = grouped(job(tmp_path / f"{size}", precision=Precision.FP16, clip_norm=0.5), size)
        hyper, dataset = spec.training, PreparedDataset.open(spec.dataset_dir, "train")
        first, *_ = dataset.batch(2, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        broken.add(int(first.targets.clamp(min=0).sum()))
        train(spec)
        norms = metrics_of(spec, "grad_norm")
        assert [step for step, norm in norms.items() if norm is None] == [3]
        found.append((metrics_of(spec, "loss_scale"), metrics_of(spec, "train_loss"), norms, exported_params(spec)))
    for scales, losses, norms, params in found[1:]:
        assert (scales, losses, norms) == found[0][:3]
        assert all(torch.equal(param, found[0][3][name]) for name, param in params.items())


@pytest.mark.long
def test_an_attempt_goes_on_with_groups_of_another_size(tmp_path: Path) -> None:
    changes = {"precision": Precision.BF16, "tied": True, "clip_norm": 0.5, "evaluate_every": None}
    whole = run(tmp_path / "whole", None, **changes)
    spec = job(tmp_path / "cut", **changes)

    def in_second_group(message: Message) -> bool:
        # When the third group is granted, the first is computed.
        operations = message.operations if isinstance(message, ComputeBlocks) else ()
        return any((each.step, each.group) == (2, 2) for each in operations)

    def in_updates(message: Message) -> bool:
        return isinstance(message, UpdateStep) and message.step == 4

    for number, (size, is_cut) in enumerate([(1, in_second_group), (3, in_updates), (2, None)], start=1):

        def look(to: ActorName, message: Message, is_cut: Callable[[Message], bool] | None = is_cut) -> None:
            if is_cut is not None and is_cut(message):
                raise CutOff

        attempt = dataclasses.replace(grouped(spec, size), attempt=Attempt(number))
        if is_cut is None:
            train(attempt, on_message=look)
        else:
            with pytest.raises(CutOff):
                train(attempt, on_message=look)
    Run.of(spec).assert_equals(whole)


# --- bytes moved ---------------------------------------------------------------------------------------------------


@dataclass
class Moved:
    """Bytes by kind and step, as the actors recorded them."""

    nbytes: Counter[tuple[SpanKind, int]] = field(default_factory=Counter)

    def note(self, to: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            for span in message.spans:
                self.nbytes[span.kind, span.step] += span.nbytes


@pytest.mark.parametrize(
    ("group_size", "tied"),
    [
        pytest.param(size, tied, marks=() if tied and size == 1 else pytest.mark.long)
        for size, tied in product(GROUP_SIZES, (False, True))
    ],
)
def test_each_group_leaves_its_sums_to_the_next_and_fetches_params(tmp_path: Path, group_size: int, tied: bool) -> None:
    spec = job(tmp_path / "job", tied=tied, total_steps=3, evaluate_every=None, placement=PLACES["SSDs"])
    spec, moved = grouped(spec, group_size), Moved()
    train(spec, on_message=moved.note)
    layout, num_groups = make_partition(spec).layout, -(-NUM_MICROBATCHES // group_size)
    # The head's use of the embedding has a sum of its own.
    uses = [layout.blocks[block].numel for shared in layout.shared for block in shared]
    for step in (1, 2, 3):
        for kind in (SpanKind.COPY_PARTIAL_OUT, SpanKind.COPY_PARTIAL_IN):
            assert moved.nbytes[kind, step] == 4 * sum(uses) * (num_groups - 1)
        assert moved.nbytes[SpanKind.COPY_GRAD_OUT, step] == 4 * layout.numel
        # Params are named by the step before. The embedding and the head have buffers of their own. Layers have two,
        # which still hold the last two after the head, and the first two between groups.
        once, layers = layout.blocks[0].numel + layout.blocks[-1].numel, layout.blocks[1:-1]
        num_loads = 2 * len(layers) * num_groups - 2 * (2 * num_groups - 1)
        assert moved.nbytes[SpanKind.COPY_PARAMS_IN, step - 1] == 4 * (once + num_loads * layers[0].numel)


def test_sums_of_what_rests_on_the_device_stay_there(tmp_path: Path) -> None:
    spec = job(tmp_path / "job", tied=True, total_steps=2, evaluate_every=None, placement=PLACES["mixed"])
    spec, moved = grouped(spec, 2), Moved()
    train(spec, on_message=moved.note)
    layout = make_partition(spec).layout
    others = sum(block.numel for block in layout.blocks if block.index not in spec.placement.device_blocks)
    assert moved.nbytes[SpanKind.COPY_PARTIAL_OUT, 1] == moved.nbytes[SpanKind.COPY_PARTIAL_IN, 1] == 4 * others


def test_no_more_micro_batches_than_a_group_has_are_held_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Counter[int]()
    forward = BlockRunner.forward

    def noting(self: BlockRunner, block: Any, step: int, batch: Any, **options: Any) -> None:
        forward(self, block, step, batch, **options)
        held[len(self.inputs[-1])] += 1

    monkeypatch.setattr(BlockRunner, "forward", noting)
    spec = grouped(job(tmp_path / "job", total_steps=2, evaluate_every=None, num_validation_examples=0), 3)
    train(spec)
    num_forward = len(make_partition(spec).layout.blocks) - 1
    assert held == {3: 2 * num_forward, 1: 2 * num_forward}


@pytest.mark.long
def test_swapped_activations_need_room_for_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_layout, "ACTIVATION_SLOT_NBYTES", 4096)  # small, as the model is
    swaps = Placement(activations=ActivationChoice.SWAP.of_layers(3), host_activation_nbytes=4096)
    spec = job(tmp_path / "job", placement=swaps)
    needed = {}
    for size in (None, 1):
        with pytest.raises(ActivationMemoryError) as caught:
            train(grouped(spec, size))
        needed[size] = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert needed[1] == needed[None] / NUM_MICROBATCHES
    train(grouped(dataclasses.replace(spec, placement=dataclasses.replace(swaps, host_activation_nbytes=needed[1])), 1))
    Run.of(spec).assert_equals(run(tmp_path / "whole", None))


@pytest.mark.parametrize("is_out", [True, False], ids=["out", "in"])
def test_a_copy_that_fails_ends_the_attempt(tmp_path: Path, is_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, num_copies = PartialGrads._copy, 0

    def fail_third(self: PartialGrads, *args: Any, **options: Any) -> Event:
        nonlocal num_copies
        num_copies += options["is_out"] == is_out
        if num_copies == 3:
            raise RuntimeError("the link is down")
        return copy(self, *args, **options)

    monkeypatch.setattr(PartialGrads, "_copy", fail_third)
    spec = grouped(job(tmp_path / "job"), 2)
    outcome = run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "interrupted"
    assert "RuntimeError: the link is down" in outcome["error"]["message"]


@pytest.mark.long
def test_zero_infinity_fetches_params_for_each_micro_batch(tmp_path: Path) -> None:
    spec = job(
        tmp_path / "job", total_steps=2, evaluate_every=None, placement=Placement(host_activation_nbytes=8 << 20)
    )
    num_blocks, operations = len(make_partition(spec).layout.blocks), Counter[int]()

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, ComputeBlocks):
            operations.update(each.step for each in message.operations if each.phase in (Phase.FORWARD, Phase.HEAD))

    train(behaving_as(spec, System.ZERO_INFINITY, num_blocks), on_message=look)
    assert operations[1] == NUM_MICROBATCHES * num_blocks
