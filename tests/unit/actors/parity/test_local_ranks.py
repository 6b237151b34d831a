"""All actors in one process, with several GPU workers: the same losses and params to the bit as with one."""

import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.actors.whole_jobs import Run, grouped, job
from tests.support.cut_off import CutOff
from tests.support.training import exported_params, metrics_of
from tests.unit.actors.parity.test_local_groups import PLACES, train
from windlass.actors.job.context import gpu_worker_name
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import (
    ComputeBlocks,
    MemoryKind,
    MemoryReported,
    Message,
    SpanKind,
    SpansReported,
    UpdateStep,
)
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement, PlanError
from windlass.storage.ids import ActorName, Attempt, Precision, StatePrecision

NUM_MICROBATCHES = 4
RANKS = (2, 3, 4)
SOME_IN_MEMORY = Placement(host_blocks=(1, 3), num_cached_params=2, commit_every=4)
RANK_PLACES = {name: place for name, place in PLACES.items() if not place.device_blocks} | {"mixed": SOME_IN_MEMORY}


def ranked(spec: JobSpec, num_ranks: int, group_size: int | None = None) -> JobSpec:
    return dataclasses.replace(grouped(spec, group_size), num_ranks=num_ranks)


def validate_with_training_data(dataset_dir: Path) -> None:
    """Replaces the validation data by the training data, which has more examples."""
    for kind in ("tokens", "targets", "offsets"):
        (dataset_dir / f"validation.{kind}").write_bytes((dataset_dir / f"train.{kind}").read_bytes())
    meta = json.loads((dataset_dir / "meta.json").read_text())
    meta["splits"]["validation"] = meta["splits"]["train"]
    (dataset_dir / "meta.json").write_text(json.dumps(meta))


def run(root: Path, num_ranks: int, group_size: int | None = None, **changes: Any) -> Run:
    spec = ranked(job(root, **({"lanes": 1} | changes)), num_ranks, group_size)
    train(spec)
    return Run.of(spec)


# With groups of one, a rank computes several groups. Every precision and every place occurs.
QUICK = [
    (Precision.FP32, None, False, "SSDs", 1, 2, None),
    (Precision.BF16, 0.5, True, "some params stay", 3, 3, 1),
    (Precision.FP16, 0.5, False, "gradients on SSDs", 2, 2, 1),
    (Precision.BF16, None, True, "mixed", 4, 4, None),
]
ALL = [
    (*case, size)
    for case in product(Precision, (None, 0.5), (False, True), RANK_PLACES, (1, 2, 4), RANKS)
    for size in (None, 1)
    if case[3] != "gradients on SSDs" or case[1] is not None or case[0] is Precision.FP16
]


@pytest.mark.short("bf16-0.5-True-some params stay-3-3-1")
@pytest.mark.parametrize(
    ("precision", "clip_norm", "tied", "place", "lanes", "num_ranks", "group_size"),
    [
        *(pytest.param(*case, id="-".join(map(str, case))) for case in QUICK),
        *(
            pytest.param(*case, marks=pytest.mark.long, id="-".join(map(str, case)))
            for case in random.Random(1).sample(ALL, 60)
            if case not in QUICK
        ),
    ],
)
def test_the_number_of_gpu_workers_changes_no_bit(
    tmp_path: Path,
    precision: Precision,
    clip_norm: float | None,
    tied: bool,
    place: str,
    lanes: int,
    num_ranks: int,
    group_size: int | None,
) -> None:
    changes: dict[str, Any] = {
        "precision": precision,
        "clip_norm": clip_norm,
        "tied": tied,
        "lanes": lanes,
        "placement": RANK_PLACES[place],
        "state_precision": StatePrecision.SPLIT if precision is Precision.BF16 else StatePrecision.FP32,
    }
    one = run(tmp_path / "one", 1, **changes)
    run(tmp_path / "several", num_ranks, group_size, **changes).assert_equals(one)


@pytest.mark.long
@pytest.mark.parametrize(
    "placement",
    [
        Placement(streamed_blocks=(1, 2, 3), num_cached_params=0),
        pytest.param(
            Placement(
                activations=ActivationChoice.SWAP.of_layers(3),
                host_activation_nbytes=65536,
                ssd_activation_nbytes=4 << 20,
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=["layers in pieces", "activations on SSDs"],
)
@pytest.mark.usefixtures("small_activation_slots")
def test_each_gpu_worker_has_its_own_activations_and_pieces(tmp_path: Path, placement: Placement) -> None:
    one = run(tmp_path / "one", 1, placement=Placement(num_cached_params=0))
    run(tmp_path / "several", 3, 1, placement=placement).assert_equals(one)


@pytest.mark.long
def test_messages_that_are_late_change_no_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": Precision.BF16, "lanes": 2, "tied": True, "total_steps": 3}
    one = run(tmp_path / "one", 1, **changes)
    choose = random.Random(7)

    def delay(to: ActorName, message: Message) -> None:
        if choose.random() < 0.1:
            time.sleep(choose.random() * 0.01)

    spec = ranked(job(tmp_path / "several", **changes), 2, 1)
    train(spec, on_message=delay)
    Run.of(spec).assert_equals(one)


@pytest.mark.long
def test_an_overflow_on_one_gpu_worker_skips_the_step_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = set[int]()
    cross_entropy = F.cross_entropy

    def break_some(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = cross_entropy(logits, targets, **options)
        return loss * float("inf") if int(targets.clamp(min=0).sum()) in broken else loss

    monkeypatch.setattr(F, "cross_entropy", break_some)
    found = []
    for num_ranks in (1, 2):
        options = {"precision": Precision.FP16, "clip_norm": 0.5, "total_steps": 4}
        spec = ranked(job(tmp_path / f"{num_ranks}", **options), num_ranks)
        hyper, dataset = spec.training, PreparedDataset.open(spec.dataset_dir, "train")
        batch = dataset.batch(2, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        broken.add(int(batch[2].targets.clamp(min=0).sum()))  # the first micro-batch of the second GPU worker
        train(spec)
        norms = metrics_of(spec, "grad_norm")
        assert [step for step, norm in norms.items() if norm is None] == [3]
        found.append((metrics_of(spec, "loss_scale"), metrics_of(spec, "train_loss"), norms, exported_params(spec)))
    (*first, params), (*second, others) = found
    assert first == second
    assert all(torch.equal(param, others[name]) for name, param in params.items())


def test_an_attempt_goes_on_with_another_number_of_gpu_workers(tmp_path: Path) -> None:
    changes = {"precision": Precision.BF16, "tied": True, "clip_norm": 0.5, "evaluate_every": None, "lanes": 2}
    whole = run(tmp_path / "whole", 1, **changes)
    spec = job(tmp_path / "cut", **changes)

    def in_group_of(step: int, group: int) -> Callable[[Message], bool]:
        def is_there(message: Message) -> bool:
            operations = message.operations if isinstance(message, ComputeBlocks) else ()
            return any((each.step, each.group) == (step, group) for each in operations)

        return is_there

    def in_updates(message: Message) -> bool:
        return isinstance(message, UpdateStep) and message.step == 4

    cuts: list[tuple[int, Callable[[Message], bool] | None]] = [
        (2, in_group_of(2, 1)),
        (4, in_group_of(3, 3)),
        (1, in_updates),
        (3, None),
    ]
    for number, (num_ranks, is_cut) in enumerate(cuts, start=1):

        def look(to: ActorName, message: Message, is_cut: Callable[[Message], bool] | None = is_cut) -> None:
            if is_cut is not None and is_cut(message):
                raise CutOff

        attempt = dataclasses.replace(ranked(spec, num_ranks), attempt=Attempt(number))
        if is_cut is None:
            train(attempt, on_message=look)
        else:
            with pytest.raises(CutOff):
                train(attempt, on_message=look)
    Run.of(spec).assert_equals(whole)


@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
def test_the_ssds_read_no_more_for_several_gpu_workers(tmp_path: Path, num_ranks: int) -> None:
    read: dict[int, Counter[tuple[SpanKind, int]]] = {}
    for number in (1, num_ranks):
        spec = ranked(job(tmp_path / f"{number}", total_steps=3, placement=PLACES["SSDs"], lanes=1), number)
        nbytes = read[number] = Counter[tuple[SpanKind, int]]()

        def note(to: ActorName, message: Message, nbytes: Counter[tuple[SpanKind, int]] = nbytes) -> None:
            if isinstance(message, SpansReported):
                for span in message.spans:
                    if span.kind is SpanKind.READ_PARAMS:
                        nbytes[span.kind, span.step] += span.nbytes

        train(spec, on_message=note)
    for step in (0, 1, 2):  # those that training reads
        assert read[num_ranks][SpanKind.READ_PARAMS, step] == read[1][SpanKind.READ_PARAMS, step] > 0
    # In evaluation each group of micro-batches reads all params, and groups on several GPU workers read them together.
    assert 0 < read[num_ranks][SpanKind.READ_PARAMS, 3] < read[1][SpanKind.READ_PARAMS, 3]


def test_each_gpu_worker_tells_of_its_own_device(tmp_path: Path) -> None:
    spec, told = ranked(job(tmp_path / "job", total_steps=2), 2), dict[ActorName, set[str]]()

    def note(to: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            told.setdefault(message.actor, set()).update(span.resource for span in message.spans)

    train(spec, on_message=note)
    for name in map(gpu_worker_name, range(2)):
        assert {f"{name}/compute", f"{name}/h2d", f"{name}/d2h"} == told[name]


@pytest.mark.long
def test_gpu_worker_that_only_evaluates_reports_its_memory_and_its_spans(tmp_path: Path) -> None:
    """Four micro-batches make two groups for three GPU workers, and the validation data makes more."""
    spec = job(tmp_path / "job", total_steps=3, evaluate_every=2)
    validate_with_training_data(Path(spec.dataset_dir))
    spec = dataclasses.replace(spec, num_ranks=3, num_validation_examples=18)
    told: list[Message] = []

    def note(to: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported | MemoryReported) and message.actor == gpu_worker_name(2):
            told.append(message)

    train(spec, on_message=note)
    assert [message.step for message in told if isinstance(message, SpansReported)] == [2, 3]
    assert MemoryKind.HOST in [message.kind for message in told if isinstance(message, MemoryReported)]


def test_dropout_of_gpu_workers_that_share_a_random_generator_is_refused(tmp_path: Path) -> None:
    told = r"2 GPU workers in one process on cpu share a random generator, .* dropout \(attention_dropout\)"
    with pytest.raises(ValueError, match=told):
        train(ranked(job(tmp_path / "job", dropout=0.1), 2))


def test_more_gpu_workers_than_micro_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="5 GPUs have 4 micro-batches a step"):
        train(ranked(job(tmp_path / "job"), 5))


def test_states_on_one_device_of_several_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"blocks \[0, 3\] cannot rest on a GPU, because the job has 2"):
        train(ranked(job(tmp_path / "job", placement=PLACES["mixed"]), 2))
