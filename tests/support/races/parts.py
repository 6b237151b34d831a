"""Single parts that use a device's streams, as the race checker runs them.

They are driven in ways that jobs rarely or never use. So the order is absent that messages ensure in a job.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.support.actors.specs import make_layout, make_spec
from tests.support.races.cuda import DEVICE, DEVICES
from tests.support.races.run import Recording
from windlass.actors.gpu_worker.edges.shared_params import SharedParams
from windlass.actors.gpu_worker.edges.stage_edges import StageEdges
from windlass.actors.gpu_worker.grad_accumulation import PartialGrads
from windlass.actors.job import GPU_WORKER, index_of
from windlass.actors.job.context import make_context
from windlass.actors.messages import (
    ComputeBlock,
    Crossing,
    Message,
    OfferSpan,
    OfferTaken,
    Phase,
    PullSpan,
    SpanPulled,
    StoredParams,
    SumPassed,
    SumTaken,
)
from windlass.actors.timeline.recorder import SpanRecorder
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.activations.host_store import HostActivations
from windlass.engine.device.buffer_pool import DeviceBuffers
from windlass.engine.device.device import Device, copy
from windlass.engine.device.overlaid_buffers import OverlaidBuffers
from windlass.engine.device.streams import Event
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.memory_plan.param_slices import NORM_ROW_NUMEL
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.streaming.params import PieceBuffers, StreamedParams
from windlass.engine.pieces.grad_pieces import GradPieceBuffers, PieceSums, StreamedGrad
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName, BlockIndex, JobId, Step
from windlass.storage.memory.arena import SlotPool

_SLOT_NBYTES = 4096
_DEADLINE_S = 20.0
_SUM_NUMEL = 2000
_SHARED_NUMEL = 10_000  # of a block in five chunks
_NUM_TOKENS, _HIDDEN_SIZE = 8, 16


@contextlib.contextmanager
def _opened(where: torch.device = DEVICE, **options: bool) -> Iterator[Device]:
    """Yields a device. At the end all callbacks of its streams have run."""
    threads: list[threading.Thread] = []

    def start(targets: Iterable[Callable[[], None]]) -> None:
        for target in targets:
            threads.append(threading.Thread(target=target, daemon=True))
            threads[-1].start()

    token = CancelToken(_DEADLINE_S)
    device = Device(where, token=token, start_threads=start, **options)
    try:
        yield device
    finally:
        token.cancel()
        for thread in threads:
            thread.join(_DEADLINE_S)


@contextlib.contextmanager
def _activations(recording: Recording, num_slots: int = 4) -> Iterator[tuple[Device, HostActivations]]:
    memory = torch.zeros(num_slots * _SLOT_NBYTES, dtype=torch.uint8)
    recording.memory.add_arena(memory, "activations")
    with _opened() as device:
        slots = SlotPool(0, _SLOT_NBYTES, num_slots, name="activations", token=device.token)
        store = HostActivations(device, TensorArena(memory), slots, max_leaving_nbytes=memory.nbytes)
        yield device, store


def _computed(device: Device) -> torch.Tensor:
    """Returns a tensor that the compute stream has filled."""
    tensors: list[torch.Tensor] = []
    device.compute.run(lambda: tensors.append(torch.ones(_SLOT_NBYTES, dtype=torch.uint8, device=DEVICE)))
    return tensors.pop()


def run_activations(directory: Path, recording: Recording) -> None:
    """Puts activations into host memory and gets them back, or drops them at each stage."""
    with _activations(recording) as (device, store):
        for _ in range(2):
            fetched, dropped, dropped_late = (store.put(_computed(device)) for _ in range(3))
            store.drop(dropped)
            for handle in (fetched, dropped_late):
                store.prefetch(handle)
            store.drop(dropped_late)
            tensor = store.get(fetched)
            device.compute.run(lambda tensor=tensor: tensor.add(1))
            del tensor
        device.synchronize()


def run_fast_activations(directory: Path, recording: Recording) -> None:
    """Does the same where copies have ended when the compute thread asks."""
    recording.cuda.is_fast = True
    run_activations(directory, recording)


def run_blocking_copies(directory: Path, recording: Recording) -> None:
    """Copies buffers in and out while the caller waits, and reuses them."""
    host = torch.zeros(2 * _SLOT_NBYTES, dtype=torch.uint8)
    recording.memory.add_arena(host, "copies")
    with _opened(poison_released=True) as device:
        for _ in range(2):
            buffer = device.take(_SLOT_NBYTES // 4, torch.float32)
            device.copy_in(buffer, host[:_SLOT_NBYTES].view(torch.float32))
            host[:_SLOT_NBYTES] = 1
            device.compute.run(lambda buffer=buffer: buffer.add_(1))
            device.synchronize()
            device.copy_out(host[_SLOT_NBYTES:].view(torch.float32), buffer)
            host[_SLOT_NBYTES:].sum()
            device.give(buffer)


def run_buffers(directory: Path, recording: Recording) -> None:
    """Fills one buffer again and again while the compute stream uses it."""
    with _opened() as device:
        host = torch.zeros(_SLOT_NBYTES, dtype=torch.uint8)
        buffers = DeviceBuffers(device, {(_SLOT_NBYTES, torch.uint8): 1}, name="test")
        for _ in range(2):
            buffer = buffers.take(_SLOT_NBYTES, torch.uint8, device.h2d)
            device.h2d.run(lambda buffer=buffer: copy(buffer, host))
            device.compute.wait(device.h2d.record())
            device.compute.run(lambda buffer=buffer: buffer.add(1))
            buffers.give(buffer, device.compute)


class _Pieces:
    """A source of pieces."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def load(self, target: torch.Tensor, start: int) -> None:
        """See PieceSource."""
        copy(target, self._flat[start : start + target.numel()])

    def loaded(self, begun: Event, copied: Event, nbytes: int) -> None:
        """See PieceSource."""
        assert begun.time_s() <= copied.time_s()


def run_pieces(directory: Path, recording: Recording) -> None:
    """Computes with pieces of a layer, on demand and prefetched; a last one is prefetched and not used."""
    numel = 3 * _SLOT_NBYTES // 4
    host = torch.zeros(2 * numel)
    recording.memory.add_arena(host, "pieces")
    with _opened() as device:
        # Two slots, so that an operation need not wait for the end of the one before.
        slots = SlotPool(0, numel * 4, 2, name="a block", token=device.token)
        buffers = PieceBuffers(device, numel // 3, torch.float32, 2)
        bounds = (0, numel // 3, 2 * numel // 3, numel)
        for pieces in ((0, 1, 2), (0, 1, 2), (0,), (0, 1, 2)):
            held = slots.acquire(1)
            block = host[held[0].offset // 4 :]
            params = StreamedParams(buffers, _Pieces(block), bounds, block[:0])
            device.compute.run(functools.partial(buffers.begin, params, BlockIndex(1), goes_backward=False))
            for piece in pieces:

                def use(piece: int = piece) -> None:
                    buffers.hold(piece, backward=False).sum()
                    if piece < 2:
                        buffers.release(piece)

                device.compute.run(use)
            device.compute.run(buffers.end)
            device.compute.then(functools.partial(slots.release, held))
        slots.drain()


class _GradHome:
    """Host memory for a gradient in pieces."""

    def __init__(self, recording: Recording, numel: int) -> None:
        self._flat = torch.zeros(numel)
        recording.memory.add_arena(self._flat, "a gradient")

    def store(self, source: torch.Tensor, start: int) -> None:
        """See GradHome."""
        copy(self._flat[start : start + source.numel()], source)

    def load(self, target: torch.Tensor, start: int) -> None:
        """See GradHome."""
        copy(target, self._flat[start : start + target.numel()])

    def moved(self, begun: Event, ended: Event, nbytes: int, *, is_out: bool) -> None:
        """See GradHome."""
        assert begun.time_s() <= ended.time_s()


def run_overlaid_buffers(directory: Path, recording: Recording) -> None:
    """Fills a user's buffer with copies, twice without another user between."""
    host = torch.zeros(_SUM_NUMEL)
    recording.memory.add_arena(host, "a sum")
    user = BlockIndex(1)
    with _opened() as device:
        memory = OverlaidBuffers(device, {None: [], user: [(_SUM_NUMEL, torch.float32)]}, name="sums")
        for _ in range(2):
            flat = memory.take(user, _SUM_NUMEL, torch.float32, device.h2d)
            device.h2d.run(functools.partial(copy, flat, host))
            device.compute.wait(device.h2d.record())
            device.compute.run(functools.partial(flat.add, 1))
            memory.give(flat, device.compute)


def run_grads_in_pieces(directory: Path, recording: Recording) -> None:
    """Continues a gradient that is in host memory, in two micro-batches.

    The first pieces are copied to buffers that no work has used. A piece comes back to another buffer than it left.
    """
    numel, num_pieces = _SLOT_NBYTES // 4, 2
    params = [(f"matrix {index}", index * numel, numel) for index in range(num_pieces)]
    home, sums = _GradHome(recording, num_pieces * numel), PieceSums({name for name, *_ in params})
    sums.stored = dict.fromkeys(range(num_pieces), (home, None))
    with _opened() as device:
        flats = [torch.empty(numel + NORM_ROW_NUMEL, device=DEVICE) for _ in range(num_pieces + 1)]
        bounds = [index * numel for index in range(num_pieces + 1)]
        grad = StreamedGrad(
            GradPieceBuffers(device, flats, ()), (*bounds, bounds[-1]), params, sums, home, is_complete=False
        )
        device.compute.run(grad.begin)
        for microbatch in range(2):
            device.compute.run(functools.partial(grad.begin_microbatch, microbatch))
            for name, offset, _ in reversed(params):
                added = functools.partial(torch.ones, numel, device=DEVICE)
                device.compute.run(lambda name=name, offset=offset, added=added: grad.add(name, offset, added()))
        device.compute.run(grad.end)


@dataclass(frozen=True, slots=True)
class _Summing:
    """A GPU worker's part that moves sums."""

    device: Device
    flats: DeviceBuffers
    partials: PartialGrads


@contextlib.contextmanager
def _summing(recording: Recording, num_ranks: int) -> Iterator[tuple[JobId, list[_Summing]]]:
    """Yields what moves sums in each GPU worker of a job. Its steps have two groups of micro-batches."""
    spec = make_spec(training={"num_microbatches": 2}, placement=Placement(group_size=1), num_ranks=num_ranks)
    context = make_context(spec, make_layout(_SUM_NUMEL), "/arena")
    memory = torch.zeros(context.plan.arena_nbytes, dtype=torch.uint8)
    recording.memory.add_arena(memory, "sums")
    ranks: list[_Summing] = []
    threads: list[threading.Thread] = []

    def send(to: ActorName, message: Message) -> None:
        partials = ranks[index_of(to)].partials
        if isinstance(message, SumPassed):
            partials.take_sum(message)
        elif isinstance(message, SumTaken):
            partials.release_slots(message)

    with contextlib.ExitStack() as opened:
        for rank in range(num_ranks):
            device = opened.enter_context(_opened())
            flats = DeviceBuffers(device, {(_SUM_NUMEL, torch.float32): 2}, name="sums")
            spans = SpanRecorder(GPU_WORKER, spec.job, lambda *_: None)

            def take(_: object, *buffer: Any, flats: DeviceBuffers = flats) -> torch.Tensor:
                return flats.take(*buffer)

            partials = PartialGrads(context, device, take, TensorArena(memory), spans, send, rank=rank)
            ranks.append(_Summing(device, flats, partials))
            threads.append(threading.Thread(target=partials.run, daemon=True))
            threads[-1].start()
        yield spec.job, ranks
    for thread in threads:
        thread.join(_DEADLINE_S)


def _move_sum(job: JobId, step: Step, before: _Summing, after: _Summing) -> None:
    """Moves a gradient's sum to host memory, and back for the group after it."""
    block, numel = BlockIndex(0), _SUM_NUMEL

    def operation(group: int) -> ComputeBlock:
        params = (StoredParams(block, Step(step - 1)),)
        return ComputeBlock(
            job=job, step=step, op=group, phase=Phase.BACKWARD, block=block, params=params, group=group, loss_scale=1.0
        )

    flat = before.flats.take(numel, torch.float32, before.device.compute)
    before.device.compute.run(lambda: flat.fill_(1))
    before.device.d2h.wait(before.device.compute.record())
    before.partials.copy_out(operation(0), (block, block), GradBuffer(flat, ["weight"]))
    before.flats.give(flat, before.device.d2h)
    after.partials.expect(operation(1))
    grad = after.partials.take(operation(1), (block, block))
    after.device.compute.run(lambda: grad.flat.add_(1))
    after.flats.give(grad.flat, after.device.compute)


def run_partial_sums(directory: Path, recording: Recording) -> None:
    """Moves a gradient's sum to host memory and back, into another buffer."""
    with _summing(recording, 1) as (job, (rank,)):
        _move_sum(job, Step(1), rank, rank)


def run_passed_sums(directory: Path, recording: Recording) -> None:
    """Passes the sums of some steps to another GPU worker, which gives the slots back."""
    with _summing(recording, 2) as (job, (first, second)):
        for step in range(1, 5):
            _move_sum(job, Step(step), first, second)


@contextlib.contextmanager
def _neighbours(
    recording: Recording, *, is_tied: bool = False
) -> Iterator[tuple[JobId, list[tuple[Device, StageEdges, SharedParams]]]]:
    """Yields what moves bytes in the GPU workers of two boxes. The link copies between their arenas at once.

    `is_tied`: the second block uses the params of the first one, too.
    """
    settings = {"num_microbatches": 1, "sequence_length": _NUM_TOKENS}
    layout = replace(make_layout(_SHARED_NUMEL, _SUM_NUMEL), hidden_size=_HIDDEN_SIZE)
    names: tuple[str, ...] = ()
    if is_tied:
        layout = replace(layout, shared=((BlockIndex(0),), (BlockIndex(1), BlockIndex(0))))
        names = tuple(param.name for param in layout.blocks[0].params)
    boxes: list[tuple[Device, StageEdges, SharedParams]] = []
    arenas: list[torch.Tensor] = []
    offers: dict[Crossing, OfferSpan] = {}
    pulls: dict[Crossing, PullSpan] = {}
    changed = threading.Condition()  # of the offers and pulls

    def send(_: ActorName, message: Message) -> None:
        with changed:
            if isinstance(message, OfferSpan):
                offers[message.crossing] = message
            elif isinstance(message, PullSpan):
                pulls[message.crossing] = message
            pairs = [(offers.pop(key), pulls.pop(key)) for key in offers.keys() & pulls.keys()]
            changed.notify_all()
        for offer, pull in pairs:
            target = arenas[offer.box][pull.span.offset : pull.span.offset + offer.span.nbytes]
            target.copy_(arenas[pull.box][offer.span.offset : offer.span.offset + offer.span.nbytes])
            facts: dict[str, Any] = {"job": offer.job, "step": offer.step, "crossing": offer.crossing}
            end = 2 if offer.crossing.is_shared else 1
            boxes[offer.box][end].take(
                SpanPulled(**facts, box=pull.box, nbytes=offer.span.nbytes, start_s=0.0, end_s=0.0)
            )
            boxes[pull.box][end].take(OfferTaken(**facts))

    with contextlib.ExitStack() as opened:
        for box in range(2):
            spec = make_spec(training=settings, stages=(Stage(0, 1), Stage(1, 2)), box=box)
            context = make_context(spec, layout, "/arena")
            arenas.append(torch.zeros(context.plan.arena_nbytes, dtype=torch.uint8))
            recording.memory.add_arena(arenas[box], f"hidden states of box {box}")
            device = opened.enter_context(_opened(DEVICES[box]))
            arena = TensorArena(arenas[box])
            edges = StageEdges(context, device, arena, send, rank=0)
            boxes.append((device, edges, SharedParams(context, device, arena, send, rank=0, names=names)))
        yield spec.job, boxes


def run_hidden_states(directory: Path, recording: Recording) -> None:
    """Sends the hidden states of some steps to another box. There is one slot, and memory is used again."""
    shape, num_steps = (4, _NUM_TOKENS), 6

    def operation(step: int, phase: Phase) -> ComputeBlock:
        block = BlockIndex(0 if phase is Phase.FORWARD else 1)
        params = (StoredParams(block, Step(step - 1)),)
        return ComputeBlock(
            job=job, step=Step(step), op=step, phase=phase, block=block, params=params, group=0, loss_scale=1.0
        )

    with _neighbours(recording) as (job, ((sender, outgoing, _), (receiver, incoming, _))):

        def send(step: int) -> None:
            made: list[torch.Tensor] = []
            sender.compute.run(
                lambda: made.append(torch.ones(*shape, _HIDDEN_SIZE, dtype=torch.bfloat16, device=DEVICE))
            )
            outgoing.send(operation(step, Phase.FORWARD), made, [shape])
            made.clear()

        for step in range(1, num_steps):
            incoming.expect(operation(step, Phase.HEAD), 1)
        send(1)
        for step in range(1, num_steps):
            if step + 1 < num_steps:
                send(step + 1)  # it is offered when the slot of the step before is released
            (hidden,) = incoming.receive(operation(step, Phase.HEAD), [shape])
            receiver.compute.run(lambda hidden=hidden: hidden.add(1))
            del hidden
        receiver.synchronize()


def run_shared_params(directory: Path, recording: Recording) -> None:
    """Sends the params of some steps to the box with the head, and the head's gradients of them back.

    There are fewer slots than chunks.
    """
    embedding, head, num_steps = BlockIndex(0), BlockIndex(1), 5

    def operation(step: int, phase: Phase) -> ComputeBlock:
        block, blocks = (head, (head, embedding)) if phase is Phase.HEAD else (embedding, (embedding,))
        params = tuple(StoredParams(each, Step(step - 1)) for each in blocks)
        return ComputeBlock(
            job=job, step=Step(step), op=step, phase=phase, block=block, params=params, group=0, loss_scale=1.0
        )

    with _neighbours(recording, is_tied=True) as (job, ((first, _, lending), (last, _, borrowing))):
        params = DeviceBuffers(first, {(_SHARED_NUMEL, torch.bfloat16): 1}, name="params")
        sums = DeviceBuffers(last, {(_SHARED_NUMEL, torch.float32): 1}, name="gradients")
        borrowed = borrowing.params(embedding)
        assert borrowed is not None
        for step in range(1, num_steps):
            forward, in_head, backward = (
                operation(step, phase) for phase in (Phase.FORWARD, Phase.HEAD, Phase.BACKWARD)
            )
            lending.expect(forward)
            borrowing.expect(in_head)
            flat = params.take(_SHARED_NUMEL, torch.bfloat16, first.compute)
            first.compute.run(functools.partial(flat.fill_, step))
            lending.send_params(forward, flat)
            params.give(flat, first.compute)
            borrowing.wait_for(in_head)
            total = sums.take(_SHARED_NUMEL, torch.float32, last.compute)
            last.compute.run(functools.partial(total.copy_, borrowed))
            borrowing.send_sum(in_head, GradBuffer(total, [f"layers.{embedding}.weight"]))
            sums.give(total, last.d2h)
            lending.wait_for(backward)
            (received,) = lending.received_sums(backward)
            first.compute.run(functools.partial(received.flat.add, 1))
            # In a job, the next step's params are offered when the update has had the gradient.
            first.compute.record().wait()
            assert (received.flat == step).all()
        last.synchronize()


def run_unpinning(directory: Path, recording: Recording) -> None:
    """Unpins host memory while copies are queued for which no thread has waited."""
    host = torch.zeros(3 * _SLOT_NBYTES, dtype=torch.uint8)
    recording.memory.add_arena(host, "unpinned")
    with _opened() as device:
        device.pin(host)
        stream = device.open_stream()
        for slot, copying in enumerate((device.h2d, device.d2h, stream)):
            target = host[slot * _SLOT_NBYTES :][:_SLOT_NBYTES]
            copying.run(functools.partial(copy, target, torch.ones_like(target)))
        device.unpin(host)


PARTS: dict[str, Callable[[Path, Recording], None]] = {
    "activations": run_activations,
    "activations of a fast device": run_fast_activations,
    "blocking copies": run_blocking_copies,
    "buffers": run_buffers,
    "pieces": run_pieces,
    "overlaid buffers": run_overlaid_buffers,
    "gradients in pieces": run_grads_in_pieces,
    "partial sums": run_partial_sums,
    "passed sums": run_passed_sums,
    "hidden states": run_hidden_states,
    "shared params": run_shared_params,
    "unpinning": run_unpinning,
}
