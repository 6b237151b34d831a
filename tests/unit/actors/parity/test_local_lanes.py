"""All actors in one process: results depend on the number of lanes, and on nothing else that a plan decides."""

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.actors.whole_jobs import NUM_MICROBATCHES, Run, grouped, job
from tests.support.cut_off import CutOff
from tests.support.reference_loop import train_plainly
from tests.support.training import exported_params, metrics_of
from tests.unit.actors.parity.test_local_groups import ALL, PLACES, train
from tests.unit.actors.parity.test_parity_matrix import LOSS_TOLERANCE, assert_params_agree
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import ComputeBlocks, Message
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.training_config.training_config import NUMERICS
from windlass.storage.ids import ActorName, Attempt, Precision, StatePrecision

LANES = (1, 2, 3, 4)
GROUP_SIZES = (1, 2, 3, 4)


def run(root: Path, group_size: int | None = None, **changes: Any) -> Run:
    spec = grouped(job(root, **changes), group_size)
    train(spec)
    return Run.of(spec)


QUICK_PLAIN = {(Precision.FP32, 0.5, True, 3)}
ALL_PLAIN = list(product(Precision, (None, 0.5), (False, True), LANES))


@pytest.mark.parametrize(
    ("precision", "clip_norm", "tied", "lanes"),
    [pytest.param(*case, marks=() if case in QUICK_PLAIN else pytest.mark.long) for case in ALL_PLAIN],
)
def test_steps_agree_with_a_plain_loop_of_lanes(
    tmp_path: Path, precision: Precision, clip_norm: float | None, tied: bool, lanes: int
) -> None:
    spec = job(tmp_path, precision=precision, clip_norm=clip_norm, tied=tied, lanes=lanes)
    train(spec)
    found, plain, tolerance = Run.of(spec), train_plainly(spec), LOSS_TOLERANCE[precision]
    assert found.losses == pytest.approx(plain.losses, rel=tolerance)
    assert found.validation_losses == pytest.approx(plain.validation_losses, rel=tolerance)
    assert list(found.norms.values()) == pytest.approx(plain.grad_norms, rel=100 * tolerance)
    assert_params_agree(found.params, plain.params, precision)


# Groups of one and three end inside of a lane.
QUICK_GROUPS = [(Precision.BF16, 0.5, True, "mixed", 2, 3)]
ALL_GROUPS = [(*case, lanes) for case in ALL for lanes in LANES[1:]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "clip_norm", "tied", "place", "lanes", "group_sizes"),
    [
        *(pytest.param(*case, (size,), id="-".join(map(str, (*case, size)))) for *case, size in QUICK_GROUPS),
        *(
            pytest.param(*case, GROUP_SIZES[:3], marks=pytest.mark.long, id="-".join(map(str, (*case, "all"))))
            for case in ALL_GROUPS
        ),
    ],
)
def test_the_size_of_the_groups_changes_no_bit(
    tmp_path: Path,
    precision: Precision,
    clip_norm: float | None,
    tied: bool,
    place: str,
    lanes: int,
    group_sizes: tuple[int, ...],
) -> None:
    changes: dict[str, Any] = {
        "precision": precision,
        "clip_norm": clip_norm,
        "tied": tied,
        "lanes": lanes,
        "dropout": 0.1,
        "placement": PLACES[place],
        "state_precision": StatePrecision.SPLIT if precision is Precision.BF16 else StatePrecision.FP32,
    }
    whole = run(tmp_path / "whole", **(changes | {"placement": PLACES["SSDs"]}))
    for size in group_sizes:
        run(tmp_path / f"groups-of-{size}", size, **changes).assert_equals(whole)


@pytest.mark.long
@pytest.mark.parametrize("precision", Precision)
def test_one_micro_batch_in_each_lane_equals_one_lane(tmp_path: Path, precision: Precision) -> None:
    """Left to right, the lanes are added as the micro-batches of one lane are. Without clipping norms do not matter."""
    changes = {"precision": precision, "clip_norm": None, "tied": True, "dropout": 0.1}
    one, each = (run(tmp_path / f"{lanes}", lanes=lanes, **changes) for lanes in (1, NUM_MICROBATCHES))
    assert each.losses == one.losses
    assert each.validation_losses == one.validation_losses
    assert [name for name, param in each.params.items() if not torch.equal(param, one.params[name])] == []


@pytest.mark.long
def test_lanes_are_added_in_another_order_than_micro_batches(tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    runs = [run(tmp_path / f"{lanes}", lanes=lanes, precision=Precision.FP32) for lanes in (1, 2)]
    assert runs[0].norms != runs[1].norms
    assert any(not torch.equal(param, runs[1].params[name]) for name, param in runs[0].params.items())


@pytest.mark.long
def test_an_overflow_in_one_lane_skips_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = set[int]()
    cross_entropy = F.cross_entropy

    def break_some(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = cross_entropy(logits, targets, **options)
        return loss * float("inf") if int(targets.clamp(min=0).sum()) in broken else loss

    monkeypatch.setattr(F, "cross_entropy", break_some)
    found = []
    for size in (None, 1):
        spec = grouped(job(tmp_path / f"{size}", precision=Precision.FP16, clip_norm=0.5, total_steps=4), size)
        hyper, dataset = spec.training, PreparedDataset.open(spec.dataset_dir, "train")
        batch = dataset.batch(2, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        broken.add(int(batch[2].targets.clamp(min=0).sum()))  # the first micro-batch of the second lane
        train(spec)
        norms = metrics_of(spec, "grad_norm")
        assert [step for step, norm in norms.items() if norm is None] == [3]
        found.append((metrics_of(spec, "loss_scale"), metrics_of(spec, "train_loss"), norms, exported_params(spec)))
    (*first, params), (*second, others) = found
    assert first == second
    assert all(torch.equal(param, others[name]) for name, param in params.items())


def cut_off(spec: JobSpec) -> None:
    """Cuts an attempt with groups of one micro-batch off, in the fourth group of step 3."""

    def cut(to: ActorName, message: Message) -> None:
        operations = message.operations if isinstance(message, ComputeBlocks) else ()
        if any((each.step, each.group) == (3, 3) for each in operations):
            raise CutOff

    with pytest.raises(CutOff):
        train(grouped(spec, 1), on_message=cut)


@pytest.mark.long
def test_an_attempt_goes_on_with_other_groups(tmp_path: Path) -> None:
    changes = {"precision": Precision.BF16, "tied": True, "clip_norm": 0.5, "evaluate_every": None, "lanes": 3}
    whole = run(tmp_path / "whole", **changes)
    spec = job(tmp_path / "cut", **changes)
    cut_off(spec)
    train(dataclasses.replace(grouped(spec, 2), attempt=Attempt(2)))
    Run.of(spec).assert_equals(whole)


def test_a_new_job_with_one_lane_has_the_bits_of_the_older_version_that_it_goes_on_from(tmp_path: Path) -> None:
    changes = {"precision": Precision.BF16, "clip_norm": 0.5, "evaluate_every": None, "lanes": 1}
    whole = run(tmp_path / "whole", numerics=1, **changes)
    cut_off(old := job(tmp_path / "cut", numerics=1, **changes))
    new = dataclasses.replace(old, training=dataclasses.replace(old.training, numerics=NUMERICS), attempt=Attempt(2))
    train(new)
    Run.of(new).assert_equals(whole)
