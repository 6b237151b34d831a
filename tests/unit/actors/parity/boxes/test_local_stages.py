"""All actors in one process that stands for several boxes: the same losses and params to the bit as on one box."""

import dataclasses
import filecmp
import random
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support import training
from tests.support.actors.stage_runs import PLACES, STAGES, half_exported, is_export, run, run_attempt, train
from tests.support.actors.whole_jobs import Run, grouped, job
from tests.support.cut_off import CutOff
from tests.support.training import boxes_of, journal_of, make_partition, metrics_of
from windlass.actors.job import optimizer_name
from windlass.actors.messages import (
    CommitStore,
    ComputeBlocks,
    ComputeProgressed,
    Message,
    ModelExported,
    OfferParams,
    Phase,
    SpanKind,
    SpanPulled,
    SpansReported,
    UpdateStep,
    WorkSpan,
)
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.timeline.intervals import intersect, length, union
from windlass.actors.timeline.span_files import FOLDER, load_step
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement, PlanError
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import ActorName, Attempt, Precision, StatePrecision

# Groups of four, two and one micro-batches: one, two and four groups. Every precision occurs.
QUICK = [
    ("apart", Precision.FP32, None, "SSDs", 1, "4-1", 4),
    ("tied", Precision.FP16, 0.5, "gradients on SSDs", 1, "1-3-1", 2),
    ("tied", Precision.BF16, None, "mixed", 2, "2-3", 1),
]
ALL = [
    case
    for case in product(("apart", "tied"), Precision, (None, 0.5), PLACES, (1, 2), STAGES, (1, 2, 4))
    if case[3] != "gradients on SSDs" or case[2] is not None or case[1] is Precision.FP16
]


@pytest.mark.short("tied-bf16-None-mixed-2-2-3-1")
@pytest.mark.parametrize(
    ("embeddings", "precision", "clip_norm", "place", "lanes", "division", "group_size"),
    [
        *(pytest.param(*case, id="-".join(map(str, case))) for case in QUICK),
        *(
            pytest.param(*case, marks=pytest.mark.long, id="-".join(map(str, case)))
            for case in [
                ("apart", Precision.BF16, 0.5, "some params stay", 2, "2-1-2", 1),
                ("tied", Precision.FP32, 0.5, "host memory", 1, "2-1-2", 2),
                *random.Random(1).sample(ALL, 60),
            ]
            if case not in QUICK
        ),
    ],
)
def test_the_number_of_boxes_changes_no_bit(
    tmp_path: Path,
    embeddings: str,
    precision: Precision,
    clip_norm: float | None,
    place: str,
    lanes: int,
    division: str,
    group_size: int,
) -> None:
    changes: dict[str, Any] = {
        "tied": embeddings == "tied",
        "precision": precision,
        "clip_norm": clip_norm,
        "lanes": lanes,
        "placement": PLACES[place],
        "state_precision": StatePrecision.SPLIT if precision is Precision.BF16 else StatePrecision.FP32,
    }
    one = run(tmp_path / "one", **changes)
    run(tmp_path / "several", STAGES[division], group_size, **changes).assert_equals(one)


@pytest.mark.parametrize(
    ("tied", "division", "ranks"),
    [
        (True, "2-3", (1, 2)),
        pytest.param(False, "2-3", (2, 1), marks=pytest.mark.long),
        pytest.param(False, "2-3", 2, marks=pytest.mark.long),
        pytest.param(False, "2-3", (1, 3), marks=pytest.mark.long),
        pytest.param(False, "2-1-2", (3, 1, 2), marks=pytest.mark.long),
    ],
)
def test_boxes_have_several_gpu_workers(
    tmp_path: Path, division: str, ranks: int | tuple[int, ...], *, tied: bool
) -> None:
    """Four groups of one micro-batch, and an evaluation with more groups than ranks."""
    changes: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "num_microbatches": 4, "lanes": 2}
    changes["tied"] = tied
    one = run(tmp_path / "one", **changes)
    run(tmp_path / "several", STAGES[division], 1, num_ranks=ranks, **changes).assert_equals(one)


# Groups of one micro-batch are more than the GPU workers of a box, and groups of two are not.
TIED = [
    ("2-3", (2, 1), 1, Precision.BF16, 0.5, 2),
    ("2-3", (2, 1), 2, Precision.FP32, None, 1),
    ("2-3", (2, 2), 1, Precision.FP32, 0.5, 1),
    ("2-3", (2, 2), 2, Precision.BF16, None, 1),
    ("2-3", (2, 2), 2, Precision.FP16, 0.5, 2),
    ("2-3", (1, 3), 1, Precision.BF16, None, 3),  # groups end inside of lanes
    ("2-3", (1, 3), 1, Precision.BF16, 0.5, 1),
    ("2-3", (1, 3), 2, Precision.FP32, 0.5, 1),  # the third GPU worker has a part in evaluations only
    ("4-1", (1, 3), 1, Precision.FP32, None, 2),
    ("1-4", (3, 2), 2, Precision.BF16, 0.5, 1),
    ("2-1-2", (2, 3, 2), 1, Precision.BF16, 0.5, 2),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("division", "ranks", "group_size", "precision", "clip_norm", "lanes"),
    [pytest.param(*case, id="-".join(map(str, case))) for case in TIED],
)
def test_boxes_with_several_gpu_workers_share_the_embedding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    division: str,
    ranks: tuple[int, ...],
    group_size: int,
    precision: Precision,
    clip_norm: float | None,
    lanes: int,
) -> None:
    """It has more chunks than there are slots to receive them."""
    monkeypatch.setattr(training, "CHUNK_NUMEL", 2048)
    changes: dict[str, Any] = {"precision": precision, "clip_norm": clip_norm, "num_microbatches": 4, "lanes": lanes}
    changes |= {"tied": True, "placement": Placement(num_cached_params=0)}
    one = run(tmp_path / "one", **changes)
    run(tmp_path / "several", STAGES[division], group_size, num_ranks=ranks, **changes).assert_equals(one)


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
def test_boxes_have_their_own_activations_and_pieces(tmp_path: Path, placement: Placement) -> None:
    one = run(tmp_path / "one", placement=Placement(num_cached_params=0))
    run(tmp_path / "several", STAGES["2-3"], 1, placement=placement).assert_equals(one)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tied", "division", "ranks", "streams_ends"),
    [
        *((False, *case, False) for case in (("4-1", (2, 1)), ("1-4", (1, 2)), ("2-3", (2, 2)), ("1-3-1", 2))),
        *((False, *case, True) for case in (("4-1", 1), ("2-3", (2, 2)), ("1-3-1", 2))),
        *((True, division, 1, False) for division in ("4-1", "1-4", "1-3-1")),
        *(
            (True, *case, False)
            for case in (("4-1", (2, 1)), ("1-4", (1, 2)), ("2-3", (2, 2)), ("2-3", (1, 3)), ("1-3-1", 2))
        ),
    ],
)
def test_boxes_have_gradients_in_pieces_of_several_lanes(
    tmp_path: Path, tied: bool, division: str, ranks: int | tuple[int, ...], streams_ends: bool
) -> None:
    """The embedding or the head, or both, are on another box than the layers."""
    changes: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "num_microbatches": 4, "lanes": 2}
    changes |= {"tied": tied, "placement": Placement(num_cached_params=0)}
    one = run(tmp_path / "one", **changes)
    changes["placement"] = Placement(
        num_cached_params=0, streamed_blocks=(1, 2, 3), streams_grads=True, streams_ends=streams_ends
    )
    run(tmp_path / "several", STAGES[division], 2, num_ranks=ranks, **changes).assert_equals(one)


@pytest.mark.long
@pytest.mark.parametrize(
    ("division", "ranks", "group_size", "num_microbatches"),
    [("4-1", 1, 1, 4), ("2-3", (2, 2), 2, 4), ("2-3", 1, 1, 1)],
)
@pytest.mark.usefixtures("small_activation_slots")
def test_the_box_of_the_head_rounds_its_sums_over_slices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    division: str,
    ranks: int | tuple[int, ...],
    group_size: int,
    num_microbatches: int,
) -> None:
    """Gradients leave in 16 bits. The head may be without layers, and passes sums to the next group in fp32."""
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 16)
    changes: dict[str, Any] = {"precision": Precision.BF16, "accumulation_precision": Precision.BF16, "clip_norm": 0.5}
    changes |= {"num_microbatches": num_microbatches, "placement": Placement(num_cached_params=0)}
    one = run(tmp_path / "one", **changes)
    changes["placement"] = Placement(
        num_cached_params=0, streamed_blocks=(1, 2, 3), streams_grads=True, streams_ends=True
    )
    run(tmp_path / "several", STAGES[division], group_size, num_ranks=ranks, **changes).assert_equals(one)


@pytest.mark.long
@pytest.mark.parametrize(("tied", "ranks"), [(True, ()), (False, ()), (True, (2, 2))])
def test_an_overflow_in_one_group_skips_the_step_on_all_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tied: bool, ranks: tuple[int, ...]
) -> None:
    broken, found = set[int](), []
    cross_entropy = F.cross_entropy

    def break_some(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = cross_entropy(logits, targets, **options)
        return loss * float("inf") if int(targets.clamp(min=0).sum()) in broken else loss

    monkeypatch.setattr(F, "cross_entropy", break_some)
    for division in ((Stage(0, 5),), STAGES["2-3"]):
        spec = grouped(
            job(tmp_path / f"{len(division)}", precision=Precision.FP16, total_steps=4, lanes=1, tied=tied), 2
        )
        hyper, dataset = spec.training, PreparedDataset.open(spec.dataset_dir, "train")
        batch = dataset.batch(2, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        broken.add(int(batch[2].targets.clamp(min=0).sum()))  # in the second group
        train(spec, division, ranks if len(division) > 1 else ())
        norms = metrics_of(spec, "grad_norm")
        assert [step for step, norm in norms.items() if norm is None] == [3]
        found.append((metrics_of(spec, "loss_scale"), Run.of(spec)))
    (scales, one), (others, several) = found
    assert scales == others
    several.assert_equals(one)


@pytest.mark.parametrize(
    ("tied", "evaluate_every"),
    [(True, None), *(pytest.param(tied, 2, marks=pytest.mark.long) for tied in (False, True))],
)
def test_an_attempt_goes_on_with_the_same_boxes_after_it_was_cut_off(
    tmp_path: Path, *, tied: bool, evaluate_every: int | None
) -> None:
    """With evaluations, that of the last commit is repeated at the start of an attempt."""
    changes: dict[str, Any] = {
        "precision": Precision.BF16,
        "clip_norm": 0.5,
        "tied": tied,
        "evaluate_every": evaluate_every,
        "total_steps": 4,
    }
    whole = run(tmp_path / "whole", **changes)
    spec = grouped(job(tmp_path / "cut", lanes=1, **changes), 2)

    def in_backward(to: ActorName, message: Message) -> bool:
        operations = message.operations if isinstance(message, ComputeBlocks) else ()
        return any((each.step, each.group, each.phase) == (2, 1, Phase.BACKWARD) for each in operations)

    def in_updates(to: ActorName, message: Message) -> bool:
        return isinstance(message, UpdateStep) and message.step == 3

    def in_commit(to: ActorName, message: Message) -> bool:
        """The first box may commit the step, and the last one does not."""
        return isinstance(message, CommitStore) and message.step == 3 and to == "b2/ssd-0"

    for number, is_cut in enumerate((in_backward, in_updates, in_commit, None), start=1):

        def look(to: ActorName, message: Message, is_cut: Callable[..., bool] | None = is_cut) -> None:
            if is_cut is not None and is_cut(to, message):
                raise CutOff

        attempt = dataclasses.replace(spec, attempt=Attempt(number))
        if is_cut is None:
            train(attempt, STAGES["2-1-2"], on_message=look)
        else:
            with pytest.raises(CutOff):
                train(attempt, STAGES["2-1-2"], on_message=look)
    Run.of(spec).assert_equals(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"num_ssds": 0, "placement": Placement(host_blocks=(0, 1, 2, 3, 4), commit_every=3)}, marks=pytest.mark.long
        ),
    ],
    ids=["SSDs", "no SSDs"],
)
def test_the_exported_files_are_those_of_one_box(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {"precision": Precision.BF16, "evaluate_every": None, "total_steps": 2, "checkpoint_every": 1} | changes
    run(tmp_path / "one", **changes)
    asked: list[OfferParams] = []

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, OfferParams):
            assert to == optimizer_name(0, 1 if message.key.block < 3 else 2)
            asked.append(message)

    spec = job(tmp_path / "several", lanes=1, **changes)
    train(spec, STAGES["2-1-2"], on_message=look)
    layout = make_partition(spec).layout.of_blocks(2, 5)
    elsewhere = [key for block in layout.blocks for key in layout.chunk_keys(block.index)]
    assert [(each.step, each.key) for each in asked] == [(step, key) for step in (1, 2) for key in elsewhere]
    for name in ("out", "out-step-1"):
        here, there = tmp_path / "one" / name, tmp_path / "several" / name
        names = sorted(path.name for path in here.iterdir())
        assert sorted(path.name for path in there.iterdir()) == names
        assert filecmp.cmpfiles(here, there, names, shallow=False) == (names, [], [])


@pytest.mark.long
def test_an_export_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    """Also if only the report of a complete one was lost. Then no other box is asked for anything."""
    changes: dict[str, Any] = {"precision": Precision.BF16, "num_validation_examples": 0, "total_steps": 2}
    whole = run(tmp_path / "whole", **changes)
    spec = job(tmp_path / "cut", lanes=1, **(changes | {"checkpoint_every": 1}))
    seen: list[Message] = []

    def is_third_chunk(message: Message) -> bool:
        pulled = [each for each in seen if isinstance(each, SpanPulled) and is_export(each)]
        return len(pulled) == 3 and message is pulled[-1]

    def is_report_of_model(message: Message) -> bool:
        return isinstance(message, ModelExported) and message.step == 2

    exported = []
    for number, is_cut in enumerate((is_third_chunk, is_report_of_model), start=1):
        seen.clear()

        def look(to: ActorName, message: Message, is_cut: Callable[[Message], bool] = is_cut) -> None:
            seen.append(message)
            if is_cut(message):
                raise RuntimeError("the process ends here")

        outcome = run_attempt(
            *boxes_of(dataclasses.replace(spec, attempt=Attempt(number)), STAGES["2-3"]), on_message=look
        )
        assert outcome["status"] == "interrupted"
        exported.append([Path(f"{spec.output_dir}{suffix}").exists() for suffix in ("-step-1", "")])
        assert half_exported(spec) == []
    assert exported == [[False, False], [True, True]]
    seen.clear()
    again = dataclasses.replace(spec, attempt=Attempt(3))
    train(again, STAGES["2-3"], on_message=lambda to, message: seen.append(message))
    assert not any(map(is_export, seen))
    Run.of(spec).assert_equals(whole)


@pytest.mark.long
@pytest.mark.parametrize(("tied", "ranks"), [(True, ()), (False, ()), (True, (2, 1, 2)), (True, (1, 2, 3))])
def test_messages_that_are_late_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tied: bool, ranks: tuple[int, ...]
) -> None:
    monkeypatch.setattr(training, "CHUNK_NUMEL", 2048)  # a shared embedding has more chunks than slots to receive them
    changes: dict[str, Any] = {"precision": Precision.BF16, "lanes": 2, "total_steps": 3, "tied": tied}
    one = run(tmp_path / "one", **changes)
    choose = random.Random(7)

    def delay(to: ActorName, message: Message) -> None:
        if choose.random() < 0.1:
            time.sleep(choose.random() * 0.01)

    spec = grouped(job(tmp_path / "several", **changes), 1)
    train(spec, STAGES["2-1-2"], ranks, on_message=delay)
    Run.of(spec).assert_equals(one)


def test_boxes_compute_at_once(tmp_path: Path) -> None:
    """The first box passes the second and third group forward before the first one returns."""
    spec, order = grouped(job(tmp_path / "job", total_steps=1, evaluate_every=None, lanes=1), 1), []
    spans: list[WorkSpan] = []

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            spans.extend(message.spans)
        if isinstance(message, ComputeProgressed) and message.actor == "gpu-0":
            order.extend((each.phase, each.group) for each in message.computed if each.block == 0)

    train(spec, STAGES["2-3"], on_message=look)
    training = [each for each in order if each[0] in (Phase.FORWARD, Phase.BACKWARD)]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert training == [
        (forward, 0),
        (forward, 1),
        (backward, 0),
        (forward, 2),
        (backward, 1),
        (forward, 3),
        (backward, 2),
        (backward, 3),
    ]
    kinds = (SpanKind.FORWARD, SpanKind.HEAD, SpanKind.BACKWARD)
    here, there = (
        union((span.start_s, span.end_s) for span in spans if span.resource == f"{name}/compute" and span.kind in kinds)
        for name in ("gpu-0", "b1/gpu-0")
    )
    assert length(intersect(here, there)) > 0


def test_events_name_the_boxes_and_tell_once_that_training_begins(tmp_path: Path) -> None:
    spec = grouped(job(tmp_path / "job", total_steps=1, evaluate_every=None, lanes=1), 1)
    spec = dataclasses.replace(spec, box_names=("head", "attic"))
    train(spec, STAGES["2-3"])
    told = [record.message for record in journal_of(spec)]
    assert len([message for message in told if message.endswith("training begins")]) == 1
    updaters = {message.split()[0] for message in told if " updates with " in message}
    assert updaters >= {"head/optimizer-0", "attic/optimizer-0"}, told


@pytest.mark.parametrize("embeddings", ["apart", pytest.param("tied", marks=pytest.mark.long)])
def test_the_timeline_shows_how_boxes_overlap_wait_and_use_the_link(tmp_path: Path, embeddings: str) -> None:
    """Four groups of micro-batches on two boxes."""
    spec = grouped(job(tmp_path / "job", total_steps=2, evaluate_every=None, lanes=1, tied=embeddings == "tied"), 1)
    spec = dataclasses.replace(spec, box_names=("head", "attic"))
    train(spec, STAGES["2-3"])
    kept = load_step(Path(spec.job_dir) / FOLDER, 2)
    assert kept is not None
    summary, period_s = kept.summary, kept.end_s - kept.start_s
    assert summary == metrics_of(spec, "timeline")[2]
    kinds = (SpanKind.FORWARD, SpanKind.HEAD, SpanKind.BACKWARD)
    computing = {
        resource: union(
            (span.start_s, span.end_s) for span in kept.spans if span.resource == resource and span.kind in kinds
        )
        for resource in ("gpu-0/compute", "b1/gpu-0/compute")
    }
    assert length(intersect(*computing.values())) > 0
    assert [box["box"] for box in summary["boxes"]] == ["head", "attic"]
    for box, other in zip(summary["boxes"], ("attic", "head"), strict=True):
        assert sum(box["stall_s"].values()) + box["compute_s"] == pytest.approx(period_s, abs=1e-4)
        assert box["compute_s"] == pytest.approx(summary["busy_s"][f"{box['box']}/gpu-0/compute"], abs=1e-5)
        assert set(box["waits_for_s"]) <= {other}
        assert box["stall_s"].get("other_box", 0.0) == pytest.approx(box["waits_for_s"].get(other, 0.0), abs=1e-5)
    # The first box ends each step, with gradients for which it waits.
    assert summary["boxes"][0]["waits_for_s"]["attic"] > 0
    there, back = (link["moved_bytes_of"] for link in summary["links"])
    assert [(link["from"], link["to"]) for link in summary["links"]] == [("head", "attic"), ("attic", "head")]
    assert there["hidden_states"] == back["gradients"] > 0
    shared = {"shared_params"} if embeddings == "tied" else set()
    assert (set(there), set(back)) == ({"hidden_states"} | shared, {"gradients"} | shared)
    crossed = [span for span in kept.spans if span.resource.startswith("link-")]
    assert {(span.resource, span.box) for span in crossed} == {("link-0-1", 0), ("link-1-0", 1)}
    assert all(span.start_s <= span.end_s for span in crossed)


def test_stages_that_leave_out_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"stages \[\(0, 2\), \(3, 5\)\] must divide blocks 0 to 4"):
        train(job(tmp_path / "job"), (Stage(0, 2), Stage(3, 5)))


def test_boxes_of_which_one_has_no_ssds_are_refused(tmp_path: Path) -> None:
    first, other = boxes_of(job(tmp_path / "job"), STAGES["2-3"])
    other = dataclasses.replace(other, ssd_dirs=(), placement=Placement(host_blocks=(2, 3, 4)))
    with pytest.raises(PlanError, match=r"box 1 of the job have no SSDs"):
        run_local(first, other_boxes=[other], partition=make_partition(first), direct=False)


def test_boxes_with_groups_of_different_size_are_refused(tmp_path: Path) -> None:
    spec = job(tmp_path / "job")
    first, other = boxes_of(spec, STAGES["2-3"])
    with pytest.raises(PlanError, match=r"groups of 1 micro-batches.* the first box has groups of 2"):
        run_local(grouped(first, 2), other_boxes=[grouped(other, 1)], partition=make_partition(spec), direct=False)
