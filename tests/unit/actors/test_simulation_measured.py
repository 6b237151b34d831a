"""What is simulated beside what a real job takes in this process, on a machine of which every rate is declared.

The model is small and the rates are low, so the machine's own time hardly counts. Nothing is fitted.
"""

import json
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training import has_direct_io, journal_of, make_partition, make_spec
from tests.unit.actors.slow_machine import SlowMachine
from windlass.actors.admission import survey_ssds
from windlass.actors.context import JobContext, make_context
from windlass.actors.journal import METRICS
from windlass.actors.local import run_local
from windlass.actors.messages import Message, Phase, SpanKind, SpansTold, WorkSpan
from windlass.actors.scheduler import job_shape
from windlass.actors.simulation import Rates, Work, simulate
from windlass.engine.data import FORMAT_VERSION
from windlass.engine.prepare import SplitWriter
from windlass.planner import plan
from windlass.planner.activations import ActivationChoice
from windlass.planner.plan import Placement
from windlass.storage.ids import ActorName

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("unchecked_activations")]

NUM_LAYERS, NUM_STEPS, BATCH_SIZE, LENGTH = 3, 4, 4, 48
# What the plan and the choices decide alone, and no race.
_DECIDED = (
    SpanKind.COPY_PARAMS_IN,
    SpanKind.COPY_GRAD_OUT,
    SpanKind.COPY_PARTIAL_OUT,
    SpanKind.COPY_PARTIAL_IN,
    SpanKind.COPY_ACTIVATIONS_OUT,
    SpanKind.COPY_ACTIVATIONS_IN,
    SpanKind.WRITE_ACTIVATIONS,
    SpanKind.READ_ACTIVATIONS,
)
SWAP = ActivationChoice.SWAP.of_layers(NUM_LAYERS)
INPUTS = ActivationChoice.RECOMPUTE_SWAP_INPUT.of_layers(NUM_LAYERS)
KEEP = ActivationChoice.KEEP.of_layers(NUM_LAYERS)
ROOM = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and what is slow."""

    placement: Placement
    layer_s: float  # that a micro-batch takes forward through a layer
    h2d_bytes: float = 1e9  # per second
    d2h_bytes: float = 1e9
    ssd_bytes: float | None = None  # of each SSD; None: as fast as it is
    num_microbatches: int = 2
    changes: dict[str, Any] = field(default_factory=dict)  # of spec and hyperparameters


CASES = {
    "swapped, the way out": Case(
        placement=Placement(activations=SWAP, host_activation_nbytes=ROOM),
        layer_s=0.05,
        d2h_bytes=3e6,
    ),
    "swapped, the way back": Case(
        placement=Placement(activations=SWAP, host_activation_nbytes=ROOM),
        layer_s=0.05,
        h2d_bytes=3e6,
    ),
    "inputs swapped, both": Case(
        placement=Placement(activations=INPUTS, host_activation_nbytes=ROOM),
        layer_s=0.06,
        h2d_bytes=6e5,
        d2h_bytes=6e5,
    ),
    "swapped, the SSDs": Case(
        placement=Placement(activations=SWAP, host_activation_nbytes=1 << 20, ssd_activation_nbytes=ROOM),
        layer_s=0.05,
        ssd_bytes=1.5e6,
    ),
    "in pieces": Case(placement=Placement(streamed_blocks=(1, 2, 3)), layer_s=0.1, h2d_bytes=1.2e6),
    "in pieces, graphs kept": Case(
        placement=Placement(streamed_blocks=(1, 2, 3), activations=KEEP),
        layer_s=0.1,
        h2d_bytes=1.2e6,
    ),
    "groups, the way in": Case(
        placement=Placement(group_size=2),
        num_microbatches=4,
        layer_s=0.05,
        h2d_bytes=7e5,
        d2h_bytes=2e6,
    ),
    "groups, the way out": Case(
        placement=Placement(group_size=1),
        num_microbatches=4,
        changes={"tied": True, "clip_norm": 1.0},
        layer_s=0.05,
        d2h_bytes=5e5,
    ),
    "all of it": Case(
        placement=Placement(
            group_size=2,
            streamed_blocks=(2, 3),
            activations=SWAP,
            host_activation_nbytes=1 << 20,
            ssd_activation_nbytes=ROOM,
        ),
        num_microbatches=4,
        layer_s=0.1,
        h2d_bytes=3e6,
        d2h_bytes=3e6,
        ssd_bytes=4e6,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_step_takes_as_long_as_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # As large as a tensor: beside a real one, messages about parts of a page would count.
    monkeypatch.setattr(plan, "ACTIVATION_SLOT_NBYTES", 1 << 15)
    # Less than a layer and micro-batch puts.
    monkeypatch.setattr(plan, "LEAVING_ACTIVATION_NBYTES", 1 << 18)
    case = CASES[name]
    spec = make_spec(
        tmp_path,
        placement=case.placement,
        num_microbatches=case.num_microbatches,
        total_steps=NUM_STEPS,
        evaluate_every=None,
        num_validation_examples=0,
        **case.changes,
    )
    _write_tokens(Path(spec.dataset_dir))
    partition = make_partition(spec)
    num_tokens = BATCH_SIZE * LENGTH // case.num_microbatches
    products_per_s = partition.layout.blocks[1].decay_numel * num_tokens / case.layer_s
    machine = SlowMachine(
        products_per_s=products_per_s, h2d_bytes=case.h2d_bytes, d2h_bytes=case.d2h_bytes, ssd_bytes=case.ssd_bytes
    )
    spans: list[WorkSpan] = []

    def look(_: ActorName, message: Message) -> None:
        if isinstance(message, SpansTold):
            spans.extend(message.spans)

    direct = has_direct_io(tmp_path)
    with machine.running():
        assert run_local(spec, partition=partition, direct=direct, on_message=look)["status"] == "succeeded"
    real = [record.data["timeline"] for record in journal_of(spec) if record.kind == METRICS]

    context = make_context(spec, partition.layout, "", survey_ssds(spec, direct=direct))
    ssd_rates = (case.ssd_bytes or math.inf,) * len(context.ssds)
    rates = Rates(
        h2d_bytes=case.h2d_bytes,
        d2h_bytes=case.d2h_bytes,
        ssd_read_bytes=ssd_rates,
        ssd_write_bytes=ssd_rates,
        optimizer_params=math.inf,
        device_params=math.inf,
        gives_ahead=False,
    )
    swapped = {
        block: tensors[: len(tensors) // case.num_microbatches]
        for (step, block), tensors in machine.swapped.items()
        if step == 2
    }
    work = Work(compute_s=_compute_s(context, num_tokens / products_per_s), swapped_nbytes=swapped)
    simulated = simulate(context, job_shape(context, lambda _: "{}"), rates, work)

    assert _decided(dict.fromkeys(span for step in simulated for span in step.spans)) == _decided(spans)
    # In the first step nothing is known yet of the order of pieces, and the last one has no next.
    inner = slice(1, NUM_STEPS - 1)
    real_s = statistics.fmean(timeline["period_s"] for timeline in real[inner])
    simulated_s = statistics.fmean(step.summary["period_s"] for step in simulated[inner])
    print(f"{name}: {simulated_s:.3f} s simulated, {real_s:.3f} s real: {simulated_s / real_s:.3f}")
    assert simulated_s == pytest.approx(real_s, rel=0.1)


def _compute_s(context: JobContext, product_s: float) -> dict[tuple[Phase, int], float]:
    """`product_s`: of one param with all tokens of a micro-batch."""
    layers, found = context.plan.layer_activations, {}
    for block in context.layout.blocks:
        # A tied head multiplies with the embedding's.
        shared = context.layout.shared[block.index]
        matrices = 0 if block.index == 0 else sum(context.layout.blocks[each].decay_numel for each in shared)
        forward_s = matrices * product_s * context.plan.group_size
        is_layer = 1 <= block.index <= len(layers)
        again_s = forward_s if not is_layer or layers[block.index - 1].recompute else 0.0
        found[(Phase.FORWARD, int(block.index))] = forward_s
        found[(Phase.HEAD, int(block.index))] = 3 * forward_s
        found[(Phase.BACKWARD, int(block.index))] = again_s + 2 * forward_s
    return found


def _decided(spans: Iterable[WorkSpan]) -> dict[tuple[SpanKind, int, int], int]:
    """Bytes by kind, block, and step, of those in the middle."""
    found: dict[tuple[SpanKind, int, int], int] = defaultdict(int)
    for span in spans:
        if span.kind in _DECIDED and 1 < span.step < NUM_STEPS:
            found[(span.kind, span.block, span.step)] += span.nbytes
    return found


def _write_tokens(folder: Path) -> None:
    """Examples of the same length, so that all micro-batches are alike."""
    shutil.rmtree(folder)
    folder.mkdir()
    generator = np.random.default_rng(1)
    with SplitWriter(folder, "train", LENGTH) as writer:
        for _ in range(NUM_STEPS * BATCH_SIZE):
            writer.append(generator.integers(0, 128, LENGTH + 1, dtype=np.int32), np.ones(LENGTH + 1, dtype=np.bool_))
        split = {name: getattr(writer, name) for name in ("num_examples", "num_tokens", "num_targets")}
    meta = {"version": FORMAT_VERSION, "sequence_length": LENGTH, "splits": {"train": split}}
    (folder / "meta.json").write_text(json.dumps(meta))
