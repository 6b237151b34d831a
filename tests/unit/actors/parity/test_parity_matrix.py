"""Twelve steps in every mode give the same parameters, bit for bit, and those of plain PyTorch up to rounding.

Modes must not change the result: the update order, the format of the master, the tiers of states, params and gradients,
and the treatment of activations. Cases may change it: precision, clipping, micro-batches.
"""

import dataclasses
import functools
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.reference_loop import train_plainly
from tests.support.training import (
    exported_params,
    has_direct_io,
    journal_of,
    losses_of,
    make_partition,
    make_spec,
    metrics_of,
)
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.memory_plan.activation_policy import ActivationChoice, BlockActivations
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config.training_config import Optimizer
from windlass.storage.ids import Precision, StatePrecision

pytestmark = pytest.mark.usefixtures("small_activation_slots", "unchecked_activations")

NUM_STEPS = 8
ACTIVATION_ROOM_NBYTES = 8 << 20
LOSS_TOLERANCE = {Precision.FP32: 1e-5, Precision.BF16: 1e-3, Precision.FP16: 1e-3}
# The gradient norms of these steps are between 1.1 and 2.5.
CLIP_NORMS = {"no clip": None, "always binds": 0.05, "sometimes binds": 1.5}


@dataclass(frozen=True)
class Case:
    precision: Precision
    clip: str
    num_microbatches: int

    def __str__(self) -> str:
        return f"{self.precision}-{self.clip.replace(' ', '-')}-{self.num_microbatches}"

    @property
    def needs_all_gradients(self) -> bool:
        return self.precision is Precision.FP16 or CLIP_NORMS[self.clip] is not None


class Place(StrEnum):
    """The tiers of states, params and gradients. The model has five blocks."""

    SSD = "SSD"
    CACHED = "cached"  # as SSD, and some params stay in host memory from one use to the next
    SPILLED = "spilled"  # as SSD, and most gradients spill to the SSDs
    HOST = "host memory"
    MIXED = "mixed"  # some blocks' states on the device, some in host memory, some on the SSDs


PLACEMENTS = {
    Place.SSD: Placement(num_cached_params=0),
    Place.CACHED: Placement(num_cached_params=7),
    Place.SPILLED: Placement(num_host_grad_blocks=1),
    Place.HOST: Placement(host_blocks=(0, 1, 2, 3, 4), commit_every=3),
    Place.MIXED: Placement(host_blocks=(1,), device_blocks=(0, 3), num_cached_params=2, commit_every=7),
}


TO_SSDS = "swap to SSDs"  # most of them
# For the three layers of the model.
ACTIVATIONS = {
    **{choice.value: choice.of_layers(3) for choice in ActivationChoice},
    "each layer another": (
        BlockActivations(swap_input=True, swapped=frozenset({"aten.mm.default"})),
        *ActivationChoice.KEEP.of_layers(1),
        BlockActivations(kept=frozenset({"*"})),
    ),
}
ACTIVATIONS[TO_SSDS] = ACTIVATIONS[ActivationChoice.SWAP]


@dataclass(frozen=True)
class Mode:
    states: StatePrecision
    order: UpdateOrder
    place: Place
    activations: str

    @property
    def placement(self) -> Placement:
        choices = ACTIVATIONS[self.activations]
        room = {}
        if any(choice.swaps for choice in choices):
            room = {"host_activation_nbytes": ACTIVATION_ROOM_NBYTES}
        if self.activations == TO_SSDS:
            room = {"host_activation_nbytes": 1 << 18, "ssd_activation_nbytes": ACTIVATION_ROOM_NBYTES}
        return dataclasses.replace(PLACEMENTS[self.place], activations=choices, **room)


CASES = [Case(*each) for each in product(Precision, CLIP_NORMS, (1, 3))]


@functools.cache
def modes_of(case: Case, activations: str | None = None) -> list[Mode]:
    """Every mode in which a case can run, or only those with one choice of activations. The plainest comes first."""
    states = [StatePrecision.FP32] + [StatePrecision.SPLIT] * (case.precision is Precision.BF16)
    orders = [UpdateOrder.KEPT] + [UpdateOrder.ACTIVE] * (not case.needs_all_gradients)
    modes = [Mode(*each) for each in product(states, orders, Place, ACTIVATIONS)]
    modes = [mode for mode in modes if mode.order is UpdateOrder.KEPT or mode.place is not Place.SPILLED]
    return [mode for mode in modes if activations in (None, mode.activations) or mode == modes[0]]


def chosen_runs(num_together: int) -> dict[Case, list[Mode]]:
    """A few modes, with the plainest of each case, in which everything that `covered` names occurs.

    `num_together`: values that are counted together; 1 leaves the pairs out.
    """

    def covered_together(case: Case, mode: Mode) -> set[frozenset[tuple[str, object]]]:
        return {values for values in covered(case, mode) if len(values) <= num_together}

    missing = {values for case in CASES for mode in modes_of(case) for values in covered_together(case, mode)}
    chosen: dict[Case, list[Mode]] = {}
    while missing:
        runs = [[(case, mode)] for case in CASES for mode in modes_of(case)]
        runs = [run if run[0][0] in chosen else [(run[0][0], modes_of(run[0][0])[0]), *run] for run in runs]
        best = max(
            runs, key=lambda run: len(set.union(*(covered_together(*each) for each in run)) & missing) / len(run)
        )
        for case, mode in best:
            missing -= covered_together(case, mode)
            if mode not in chosen.setdefault(case, []):
                chosen[case].append(mode)
    return chosen


@functools.cache
def covered(case: Case, mode: Mode) -> set[frozenset[tuple[str, object]]]:
    """Each factor's value, and each pair of a value and a precision, except those of the activations."""
    factors = {**dataclasses.asdict(case), **dataclasses.asdict(mode)}
    with_precision = combinations([item for item in factors.items() if item[0] != "activations"], 2)
    return {frozenset([item]) for item in factors.items()} | {
        frozenset(pair) for pair in with_precision if "precision" in dict(pair)
    }


def spec_of(root: Path, case: Case, mode: Mode, **changes: Any) -> JobSpec:
    return make_spec(
        root,
        total_steps=NUM_STEPS,
        evaluate_every=None,
        precision=case.precision,
        clip_norm=CLIP_NORMS[case.clip],
        num_microbatches=case.num_microbatches,
        state_precision=mode.states,
        update_order=mode.order,
        placement=mode.placement,
        **changes,
    )


def run(spec: JobSpec) -> dict[str, torch.Tensor]:
    outcome = run_local(
        spec, partition=make_partition(spec), poison_released=True, direct=has_direct_io(Path(spec.ssd_dirs[0]).parent)
    )
    assert outcome["status"] == "succeeded", outcome
    return exported_params(spec)


QUICK_RUNS = [pytest.param(case, modes, id=str(case)) for case, modes in chosen_runs(1).items()]
PAIR_RUNS = [
    pytest.param(case, modes, id=f"{case}-pairs", marks=pytest.mark.long) for case, modes in chosen_runs(2).items()
]
ALL_RUNS = [
    pytest.param(case, modes_of(case, name), id=f"{case}-{name.replace(' ', '-')}-all", marks=pytest.mark.long)
    for case, name in product(CASES, ACTIVATIONS)
]


@pytest.mark.parametrize(("case", "modes"), QUICK_RUNS + PAIR_RUNS + ALL_RUNS)
def test_every_mode_gives_the_parameters_of_plain_pytorch(tmp_path: Path, case: Case, modes: list[Mode]) -> None:
    specs = [spec_of(tmp_path / f"mode{i}", case, mode) for i, mode in enumerate(modes)]
    found = [run(spec) for spec in specs]
    losses = [losses_of(spec) for spec in specs]
    for i, mode in enumerate(modes[1:], start=1):
        different = [name for name, param in found[0].items() if not torch.equal(found[i][name], param)]
        assert not different, f"{mode} differs from {modes[0]} in {different}"
        assert losses[i] == losses[0], f"{mode} differs from {modes[0]}"
        out_nbytes = metrics_of(specs[i], "activation_bytes_out").values()
        assert all(out_nbytes) if mode.placement.host_activation_nbytes else not any(out_nbytes)
    plain = train_plainly(specs[0])
    binds = {norm > (CLIP_NORMS[case.clip] or float("inf")) for norm in plain.grad_norms}
    assert binds == {"no clip": {False}, "always binds": {True}, "sometimes binds": {True, False}}[case.clip]
    assert losses[0] == pytest.approx(plain.losses, rel=LOSS_TOLERANCE[case.precision])
    assert_params_agree(found[0], plain.params, case.precision)


def assert_params_agree(
    params: dict[str, torch.Tensor], masters: dict[str, torch.Tensor], precision: Precision
) -> None:
    """Checks that params agree within one rounding to the precision, where a gradient exceeds rounding errors."""
    assert set(params) == set(masters)
    for name, param in params.items():
        if name.endswith("k_proj.bias") and precision is not Precision.FP32:
            # Attention ignores a constant added to all keys, so the gradient of that bias is only rounding errors. Adam
            # turns them into steps as large as the others'.
            continue
        eps = max(torch.finfo(TORCH_DTYPE[precision]).eps, 1e-4)
        torch.testing.assert_close(
            param.float(), masters[name], rtol=eps, atol=eps * 0.25, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    ("value", "optimizer"),
    [
        (float("nan"), Optimizer.ADAMW),
        pytest.param(float("inf"), Optimizer.ADAM, marks=pytest.mark.long),
        pytest.param(float("nan"), Optimizer.ADAM, marks=pytest.mark.long),
        pytest.param(float("inf"), Optimizer.ADAMW, marks=pytest.mark.long),
    ],
)
def test_steps_that_plain_pytorch_skips_are_skipped(
    tmp_path: Path, value: float, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of some batches is infinite; the loss scale of the later ones is halved each time."""
    spec = make_spec(
        tmp_path,
        total_steps=13,
        evaluate_every=None,
        precision=Precision.FP16,
        num_microbatches=3,
        optimizer=optimizer,
        clip_norm=1.0,
    )
    broken_steps = {4, 5, 6, 9}
    broken = broken_targets(spec, steps=broken_steps)
    cross_entropy = F.cross_entropy

    def break_some(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        loss = cross_entropy(logits, targets, **options)
        return loss * value if int(targets.clamp(min=0).sum()) in broken else loss

    monkeypatch.setattr(F, "cross_entropy", break_some)
    params = run(spec)
    plain = train_plainly(spec)
    assert plain.skipped == sorted(broken_steps)
    scales = metrics_of(spec, "loss_scale")
    assert list(scales.values()) == plain.loss_scales
    texts = [record.message for record in journal_of(spec) if " skipped: " in record.message]
    assert [int(text.split()[1]) for text in texts] == plain.skipped
    assert_params_agree(params, plain.params, Precision.FP16)


def broken_targets(spec: JobSpec, steps: set[int]) -> set[int]:
    """The sums of the targets of each step's first micro-batch. No other micro-batch has these sums."""
    hyper, dataset = spec.training, PreparedDataset.open(spec.dataset_dir, "train")
    sums = {
        (step, i): int(microbatch.targets.clamp(min=0).sum())
        for step in range(1, hyper.total_steps + 1)
        for i, microbatch in enumerate(dataset.batch(step - 1, hyper.batch_size, hyper.num_microbatches, hyper.seed))
    }
    chosen = {sums[(step, 0)] for step in steps}
    assert {step for (step, _), total in sums.items() if total in chosen} == steps
    return chosen
