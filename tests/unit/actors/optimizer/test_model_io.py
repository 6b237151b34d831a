"""Loading weights into the store and exporting them, chunk by chunk through a few slots."""

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.training import make_partition, make_spec
from windlass.actors.job import link_name, optimizer_name
from windlass.actors.job.context import make_context
from windlass.actors.lifecycle.report_timer import PROGRESS_EVERY_S
from windlass.actors.messages import Crossing, Message, OfferParams, OfferSpan, OfferTaken, PullSpan, SpanPulled
from windlass.actors.optimizer.box_params import BoxParams
from windlass.actors.optimizer.model_io import ModelIo
from windlass.actors.optimizer.model_mover import ModelMover
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.checkpoint.model_folder import folder_nbytes
from windlass.engine.device.dtypes import TORCH_DTYPE, state_dtype
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.optimizer.split_states import join_master
from windlass.engine.training_config.training_config import Initialization
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import (
    ALL_FORMATS,
    ActorName,
    BlockIndex,
    ChunkIndex,
    ChunkKey,
    Formats,
    Precision,
    Span,
    StateKind,
    StatePrecision,
    Step,
)
from windlass.storage.memory.arena import SlotPool

NUM_SLOTS = 2


class Bench:
    """Slots and a store in plain memory. A slot that is written keeps its contents until its write is answered."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.spec = make_spec(directory, **changes)
        self.formats = self.spec.training.formats
        self.layout = make_partition(self.spec).layout
        context = make_context(self.spec, self.layout, "/nowhere")
        self.token = CancelToken(self.spec.deadline_s)
        self.slots = SlotPool(0, 4096, NUM_SLOTS, token=self.token)
        self.memory: dict[tuple[int, StateKind], torch.Tensor] = {}
        self.store: dict[tuple[Step, ChunkKey, StateKind], torch.Tensor] = {}
        self.answers_reads = True
        self.boxes = BoxParams(optimizer_name(0, self.spec.box), context, self.send)
        self.others: dict[ActorName, Callable[[Message], None]] = {}  # what takes messages to other actors
        ticks = itertools.count(step=PROGRESS_EVERY_S)  # so that each report is due
        self.io = ModelIo(
            context,
            self.slots,
            self.make_mover,
            self.read,
            self.write,
            self.boxes,
            self.token,
            clock=lambda: next(ticks),
        )

    def send(self, to: ActorName, message: Message) -> None:
        self.others[to](message)

    @property
    def num_chunks(self) -> int:
        return sum(self.layout.num_chunks(block.index) for block in self.layout.blocks)

    def make_mover(self) -> ModelMover:
        return ModelMover(self.io.context, self.view)

    def view(self, slot: Span, key: ChunkKey, kind: StateKind) -> torch.Tensor:
        """The part of a slot that holds a state; at first it holds NaN or -1."""
        start, stop = self.layout.chunk_range(key)
        dtype = state_dtype(self.formats, kind)
        whole = torch.full((self.layout.chunk_numel,), float("nan") if dtype.is_floating_point else -1, dtype=dtype)
        return self.memory.setdefault((slot.offset, kind), whole)[: stop - start]

    def read(
        self, slot: Span, key: ChunkKey, kinds: tuple[StateKind, ...], step: Step, on_done: Callable[[], None]
    ) -> None:
        if self.answers_reads:
            for kind in kinds:
                self.view(slot, key, kind).copy_(self.store[(step, key, kind)])
            on_done()

    def write(self, slot: Span, key: ChunkKey, step: Step, on_done: Callable[[], None]) -> None:
        """Stores the states a moment later, in another thread, as an SSD server would."""

        def settle() -> None:
            for kind in self.formats.itemsizes:
                self.store[(step, key, kind)] = self.view(slot, key, kind).clone()
            on_done()

        threading.Timer(0.001, settle).start()

    def state(self, kind: StateKind, block: int) -> torch.Tensor:
        """A stored state of a whole block."""
        return torch.cat(
            [self.store[(Step(0), key, kind)] for key in self.layout.chunk_keys(self.layout.blocks[block].index)]
        )

    def masters(self) -> dict[str, torch.Tensor]:
        """The fp32 master of each parameter, or the bf16 one if there is no other."""
        if self.formats.states is StatePrecision.SPLIT:
            kinds = (StateKind.PARAM, StateKind.RESIDUAL, StateKind.EXP_AVG_SQ)
            states = [dict(self.names_and_states(kind)) for kind in kinds]
            return {name: join_master(*(state[name] for state in states)) for name in states[0]}
        kind = StateKind.MASTER if StateKind.MASTER in self.formats.itemsizes else StateKind.PARAM
        return dict(self.names_and_states(kind))

    def names_and_states(self, kind: StateKind) -> Iterator[tuple[str, torch.Tensor]]:
        for block in self.layout.blocks:
            whole = self.state(kind, block.index) if block.params else torch.empty(0)
            for param in block.params:
                yield param.name, whole[param.offset : param.offset + param.numel].view(param.shape)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("formats", ALL_FORMATS)
def test_weights_in_and_out(tmp_path: Path, formats: Formats, tied: bool) -> None:
    bench = Bench(tmp_path, precision=formats.precision, state_precision=formats.states, tied=tied)
    dtype = TORCH_DTYPE[formats.precision]
    shown: list[int] = []
    bench.io.load(shown.append)
    assert shown == sorted(set(shown))
    assert len(shown) == bench.num_chunks
    assert shown[-1] == bench.layout.numel
    assert bench.slots.statistics.in_use_nbytes == 0
    model = AutoModelForCausalLM.from_pretrained(bench.spec.model_dir, dtype=torch.float32)
    params = dict(model.named_parameters())
    masters = bench.masters()
    assert set(masters) == set(params)
    for name, master in masters.items():
        assert torch.equal(master, params[name].to(master.dtype)), name
        assert (master.dtype is torch.float32) == (formats.states is not StatePrecision.BF16)
    for kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
        assert all(not state.any() for _, state in bench.names_and_states(kind))
    for name, param in bench.names_and_states(formats.param_kind):
        assert torch.equal(param, params[name].to(dtype)), name

    shares: list[float] = []
    bench.io.export(bench.spec.output_dir, Step(0), None, shares.append)
    assert shares == sorted(shares)
    assert len(set(shares)) == bench.num_chunks
    num_files = sum(path.is_file() for path in Path(bench.spec.output_dir).rglob("*"))
    assert shares.count(1.0) == 1 + num_files  # the last chunk, and each file that is synced
    exported = AutoModelForCausalLM.from_pretrained(bench.spec.output_dir, dtype="auto")
    assert exported.dtype == dtype
    for name, param in exported.named_parameters():
        assert torch.equal(param, params[name].to(dtype)), name
    assert bench.slots.statistics.in_use_nbytes == 0


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (Path(bench.spec.model_dir) / "model.safetensors").unlink()
    bench.io.context = replace(bench.io.context, spec=bench.spec.with_training(initialization=Initialization.RANDOM))
    bench.io.load()
    masters = dict(bench.names_and_states(StateKind.MASTER))
    assert all(master.isfinite().all() for master in masters.values())
    deviation = float(masters["model.layers.0.mlp.up_proj.weight"].std())
    assert deviation == pytest.approx(0.02, rel=0.1)  # the config's initializer_range
    assert (masters["model.norm.weight"] == 1.0).all()


def test_load_that_is_aborted_raises(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(InterruptedError, match="the job was stopped"):
        bench.io.load(lambda _: bench.token.cancel())
    assert len(bench.store) < bench.num_chunks * 3


def test_an_export_that_is_aborted_leaves_nothing(tmp_path: Path) -> None:
    """Also while the export waits for a chunk: the timeout is longer than the test may take."""
    bench = Bench(tmp_path, deadline_s=3600.0)
    bench.io.load()
    bench.answers_reads = False
    before = sorted(tmp_path.iterdir())
    threading.Timer(0.1, bench.token.cancel).start()
    with pytest.raises(InterruptedError, match="the job was stopped"):
        bench.io.export(bench.spec.output_dir, Step(0))
    assert sorted(tmp_path.iterdir()) == before


def test_a_chunk_that_does_not_arrive_ends_an_export(tmp_path: Path) -> None:
    bench = Bench(tmp_path, deadline_s=0.2)
    bench.io.load()
    bench.answers_reads = False
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for .*chunk=0\) of step 0, from the SSDs"):
        bench.io.export(bench.spec.output_dir, Step(0))
    assert sorted(tmp_path.iterdir()) == before


def test_export_of_a_copy_tells_its_progress_while_bytes_are_copied_and_while_files_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system has no links, so that a copy takes as long as an export."""

    def cannot(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "hardlink_to", cannot)
    monkeypatch.setattr("fcntl.ioctl", cannot)
    bench, shares = Bench(tmp_path), list[float]()
    checkpoint, copy = Path(bench.spec.model_dir), tmp_path / "copy"
    bench.io.export(str(copy), Step(0), str(checkpoint), shares.append)
    assert folder_nbytes(copy) == folder_nbytes(checkpoint)
    assert shares == sorted(shares)
    num_files = sum(path.is_file() for path in copy.rglob("*"))
    assert 0 < shares[0] < 1.0
    assert len(shares) >= 2 * num_files


def test_load_and_export_tell_their_progress_at_intervals_only(tmp_path: Path) -> None:
    bench, shown, shares = Bench(tmp_path), list[int](), list[float]()
    bench.io._clock = lambda: 0.0
    bench.io.load(shown.append)
    bench.io.export(bench.spec.output_dir, Step(0), None, shares.append)
    assert (len(shown), len(shares)) == (1, 1)


# --- the params of other boxes --------------------------------------------------------------------------------------

STAGES = (Stage(0, 2), Stage(2, 5))


class TwoBoxes:
    """The first box and another one, whose links move bytes from slot to slot."""

    def __init__(self, directory: Path, *, host_blocks: tuple[int, ...] = ()) -> None:
        self.first, self.other = (
            Bench(
                directory / f"box{box}",
                box=box,
                stages=STAGES,
                precision=Precision.BF16,
                num_ssds=0 if host_blocks else 2,
                placement=Placement(host_blocks=tuple(filter(stage.has, host_blocks))),
                deadline_s=0.5,
            )
            for box, stage in enumerate(STAGES)
        )
        self.is_cut = False
        self.asked: list[OfferParams] = []
        self.pulls: dict[Crossing, PullSpan] = {}
        self.offers: dict[Crossing, OfferSpan] = {}
        self.lock = threading.RLock()
        self.first.others = {optimizer_name(0, 1): self.ask, link_name(0): self.pull}
        self.other.others = {link_name(1): self.offer}

    def ask(self, message: Message) -> None:
        """Has the other box carry out its part in another thread, once it is asked for as many chunks as have slots."""
        assert isinstance(message, OfferParams)
        self.asked.append(message)
        block = self.other.layout.blocks[-1].index
        if len(self.asked) == NUM_SLOTS or message.key == self.other.layout.chunk_keys(block)[-1]:
            asked, self.asked = self.asked, []
            threading.Thread(target=lambda: [self.other.io.offer(each.key, each.step) for each in asked]).start()

    def pull(self, message: Message) -> None:
        assert isinstance(message, PullSpan)
        assert message.box == 1
        self.pulls[message.crossing] = message
        self.move(message.crossing)

    def offer(self, message: Message) -> None:
        assert isinstance(message, OfferSpan)
        self.offers[message.crossing] = message
        self.move(message.crossing)

    def move(self, crossing: Crossing) -> None:
        with self.lock:
            if self.is_cut or crossing not in self.pulls or crossing not in self.offers:
                return
            pull, offer = self.pulls.pop(crossing), self.offers.pop(crossing)
        key, kind = ChunkKey(crossing.block, ChunkIndex(crossing.part)), self.first.formats.param_kind
        start, stop = self.first.layout.chunk_range(key)
        assert pull.span.nbytes == offer.span.nbytes == 2 * (stop - start)
        offset = self.first.io.context.state_offsets()[kind]
        source = self.other.view(Span(offer.span.offset - offset, 0), key, kind)
        self.first.view(Span(pull.span.offset - offset, 0), key, kind).copy_(source)
        common: dict[str, Any] = {"job": offer.job, "step": offer.step, "crossing": crossing}
        self.other.boxes.take(OfferTaken(**common))
        self.first.boxes.take(SpanPulled(**common, box=1, nbytes=offer.span.nbytes, start_s=1.0, end_s=2.0))


@pytest.mark.parametrize("host_blocks", [(), (0, 1, 2, 3, 4)], ids=["SSDs", "host memory"])
def test_the_first_box_exports_the_params_of_all_boxes(tmp_path: Path, host_blocks: tuple[int, ...]) -> None:
    boxes, shares = TwoBoxes(tmp_path, host_blocks=host_blocks), list[float]()
    for bench in (boxes.first, boxes.other):
        bench.io.load()
    boxes.first.io.export(boxes.first.spec.output_dir, Step(0), None, shares.append)
    assert shares == sorted(shares)
    assert len(set(shares)) == boxes.first.num_chunks
    for bench in (boxes.first, boxes.other):
        assert bench.slots.statistics.in_use_nbytes == 0
    model, exported = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        for path in (boxes.first.spec.model_dir, boxes.first.spec.output_dir)
    )
    params = dict(model.named_parameters())
    assert [name for name, param in exported.named_parameters() if not torch.equal(param, params[name])] == []
    assert not Path(boxes.other.spec.output_dir).exists()


def test_params_that_do_not_come_from_another_box_end_an_export(tmp_path: Path) -> None:
    boxes = TwoBoxes(tmp_path)
    for bench in (boxes.first, boxes.other):
        bench.io.load()
    boxes.is_cut = True
    before = sorted((tmp_path / "box0").iterdir())
    with pytest.raises(TimeoutError, match=r"chunk=0\) of step 0, from box 1; that box or the link to it is stuck"):
        boxes.first.io.export(boxes.first.spec.output_dir, Step(0))
    assert sorted((tmp_path / "box0").iterdir()) == before


def test_a_complete_export_asks_no_other_box(tmp_path: Path) -> None:
    boxes = TwoBoxes(tmp_path)
    boxes.first.others = {}
    Path(boxes.first.spec.output_dir).mkdir()
    boxes.first.io.export(boxes.first.spec.output_dir, Step(0))


def test_params_of_another_size_are_refused(tmp_path: Path) -> None:
    bench = TwoBoxes(tmp_path).first
    crossing = Crossing.of_params(Step(3), ChunkKey(BlockIndex(2), ChunkIndex(0)))
    with pytest.raises(ValueError, match=r"block=2, chunk=0\) are 7 bytes on their box and 16\.00 KiB on the first"):
        bench.boxes.take(
            SpanPulled(job=bench.spec.job, step=Step(3), crossing=crossing, box=1, nbytes=7, start_s=1.0, end_s=2.0)
        )


def test_a_block_without_params_is_not_asked_for(tmp_path: Path) -> None:
    bench, done = TwoBoxes(tmp_path).first, list[bool]()
    blocks = bench.layout.blocks
    layout = replace(bench.layout, blocks=(*blocks[:2], replace(blocks[2], params=()), *blocks[3:]))
    boxes = BoxParams(optimizer_name(0), replace(bench.io.context, layout=layout), bench.send)
    bench.others = {}
    boxes.pull(ChunkKey(BlockIndex(2), ChunkIndex(0)), Span(0, 4096), Step(0), lambda: done.append(True))
    assert done == [True]
