"""Tells the checker of all other accesses: of copies, update kernels, SSD transfers, and owners of slots."""

import functools
import sys
import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, SupportsIndex

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.races.checker import RaceChecker
from tests.support.races.clocks import Agent, Clock
from tests.support.races.cuda import RecordedCuda
from tests.support.races.operators import AccessMode, Memory, Range
from windlass.actors.messages import GradOffloaded, ParamsCopied
from windlass.actors.offload.param_prefetcher import ParamFeed as OffloadedParams
from windlass.actors.worker_policy.param_turns import ParamActions, ParamTurns
from windlass.actors.worker_policy.worker_queues import UpdateActions, UpdateQueue
from windlass.engine.device import device as device_module
from windlass.engine.device.device import Device
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.linear_parts import column_copy
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.streaming.params import PieceBuffers
from windlass.engine.optimizer.adam_kernel import ChunkStates, OptimizerKernel
from windlass.engine.optimizer.grad_norm import NormInParts, squared_norm
from windlass.storage.ids import Span
from windlass.storage.io_scheduler.scheduler import IoScheduler
from windlass.storage.io_scheduler.transfer_jobs import Piece, TransferJob
from windlass.storage.memory.arena import Arena, SlotPool


def follow_accesses(checker: RaceChecker, cuda: RecordedCuda, patch: pytest.MonkeyPatch) -> Memory:
    """Lets all threads that start from now on tell the checker of their accesses."""
    memory = Memory(checker, lambda device: cuda.default_of(device).agent)
    run = threading.Thread.run

    def run_noted(self: Any) -> None:
        with AccessMode(checker, memory):
            run(self)

    patch.setattr(threading.Thread, "run", run_noted)
    cuda.region_of, cuda.region_at = memory.region_of, memory.region_at
    _follow_copies(memory, patch)
    _follow_numbers(memory, patch)
    _follow_kernels(memory, patch)
    _follow_norms(memory, patch)
    _follow_arenas(memory, patch)
    _follow_slots(checker, patch)
    _follow_param_turns(checker, patch)
    _follow_pools(checker, patch)
    _follow_update_queues(checker, patch)
    _follow_transfers(checker, memory, patch)
    _follow_installed(memory, patch)
    return memory


def _follow_copies(memory: Memory, patch: pytest.MonkeyPatch) -> None:
    """Follows `copy`, which uses NumPy on a CPU."""
    bytes_of = device_module._bytes_of

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        with _disable_current_modes():
            np.copyto(bytes_of(target), bytes_of(source))
        memory.note("copy", [source], [target])

    patch.setattr(device_module, "_bytes_of", lambda tensor: tensor)
    patch.setattr(device_module, "np", SimpleNamespace(copyto=copy))
    patch.setattr(column_copy, "_runtime", lambda: None)  # which is only looked for


def _follow_numbers(memory: Memory, patch: pytest.MonkeyPatch) -> None:
    """Follows `tolist`, which is no operator."""

    def tolist(tensor: torch.Tensor) -> Any:
        memory.note("tolist", [tensor], [])
        return torch._C.TensorBase.tolist(tensor)

    patch.setattr(torch.Tensor, "tolist", tolist, raising=False)


def _follow_kernels(memory: Memory, patch: pytest.MonkeyPatch) -> None:
    """Follows updates, whose compiled kernel is no operator."""
    update = OptimizerKernel.update

    def update_noted(kernel: OptimizerKernel, states: ChunkStates, **kwargs: Any) -> None:
        with _disable_current_modes():
            update(kernel, states, **kwargs)
        others = (states.exp_avg, states.exp_avg_sq, states.param, states.master, states.residual)
        memory.note("update", [states.grad], [state for state in others if state is not None])

    patch.setattr(OptimizerKernel, "update", update_noted)


def _follow_norms(memory: Memory, patch: pytest.MonkeyPatch) -> None:
    """Follows squared norms as one operator each, because on a CPU they use other operators than on a GPU."""

    def norm_noted(values: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            result = squared_norm(values)
        found = memory.range_of(values)
        if found is not None:
            memory.region_of(result, on_device=found[0].on_device)
        memory.note("squared_norm", [values], [result])
        return result

    for name, module in list(sys.modules.items()):
        if name.startswith("windlass.") and getattr(module, "__dict__", {}).get("squared_norm") is squared_norm:
            patch.setattr(module, "squared_norm", norm_noted)
    # The norm of a gradient in pieces is followed by its operators, which are then those of a GPU.
    init = NormInParts.__init__
    patch.setattr(NormInParts, "__init__", functools.partialmethod(init, waits=False))


def _follow_arenas(memory: Memory, patch: pytest.MonkeyPatch) -> None:
    of = TensorArena.of

    def of_noted(arena: Arena) -> TensorArena:
        tensors = of(arena)
        memory.add_arena(tensors.memory, str(arena.path))
        return tensors

    patch.setattr(TensorArena, "of", of_noted)


def _follow_slots(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    hand_out, release = SlotPool._hand_out, SlotPool.release
    released: dict[tuple[int, Span], Clock | None] = {}

    def hand_out_noted(pool: SlotPool, n: int) -> list[Span]:
        spans = hand_out(pool, n)
        for span in spans:
            checker.acquire_slot(span.offset, span.offset + span.nbytes, released.get((id(pool), span)))
        return spans

    def release_noted(pool: SlotPool, spans: Sequence[Span]) -> None:
        for span in spans:
            released[id(pool), span] = checker.release_slot(span.offset, span.offset + span.nbytes)
        release(pool, spans)

    patch.setattr(SlotPool, "_hand_out", hand_out_noted)
    patch.setattr(SlotPool, "release", release_noted)


class _FreeSlots(list[Span]):
    """The free slots of params. Each passes on what was known when it was released, and nothing of other slots."""

    def __init__(self, checker: RaceChecker, slots: Iterable[Span]) -> None:
        super().__init__(slots)
        self.told: dict[Span, Clock] = {}  # of slots in use: what those knew who have copied from them
        self._checker = checker
        self._released: dict[Span, Clock | None] = {}

    def append(self, slot: Span) -> None:
        stop = slot.offset + slot.nbytes
        self._released[slot] = self._checker.release_slot(slot.offset, stop, self.told.pop(slot, None))
        super().append(slot)

    def pop(self, index: SupportsIndex = -1) -> Span:
        slot = super().pop(index)
        self._checker.acquire_slot(slot.offset, slot.offset + slot.nbytes, self._released.pop(slot, None))
        return slot


def _follow_param_turns(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    """Follows the slots of params. The last GPU worker that has copied from one releases it for all of them."""
    make, copied = ParamTurns.__init__, ParamTurns.copied

    def make_noted(turns: ParamTurns, slots: Sequence[Span], **options: Any) -> None:
        make(turns, slots, **options)
        turns._free = _FreeSlots(checker, turns._free)

    def copied_noted(turns: ParamTurns, message: ParamsCopied) -> ParamActions:
        assert isinstance(turns._free, _FreeSlots)
        told, slots, clock = turns._free.told, turns._uses[message.use].slots, checker.snapshot()
        for key in message.keys:
            told.setdefault(slots[key], Clock()).join(clock)
        return copied(turns, message)

    patch.setattr(ParamTurns, "__init__", make_noted)
    patch.setattr(ParamTurns, "copied", copied_noted)


def _follow_pools(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    """Follows buffers that a device hands on, when no queued work uses them."""
    take, give = Device.take, Device.give
    given: dict[int, Clock] = {}

    def take_noted(device: Device, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = take(device, numel, dtype)
        if (clock := given.pop(buffer.data_ptr(), None)) is not None:
            checker.learn(clock)
        return buffer

    def give_noted(device: Device, buffer: torch.Tensor) -> None:
        given[buffer.data_ptr()] = checker.snapshot()
        give(device, buffer)

    patch.setattr(Device, "take", take_noted)
    patch.setattr(Device, "give", give_noted)


def _follow_update_queues(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    """Follows gradients that wait for the result of their step, until any thread begins their update."""
    add, updated = UpdateQueue.add, UpdateQueue.updated
    clocks: dict[tuple[int, int, int], Clock] = {}

    def learned(queue: UpdateQueue, actions: UpdateActions) -> UpdateActions:
        for message in (*actions.begin, *actions.discard):
            checker.learn(clocks.pop((id(queue), message.step, message.block)))
        return actions

    def add_noted(queue: UpdateQueue, message: Any) -> UpdateActions:
        if isinstance(message, GradOffloaded):
            clocks[id(queue), message.step, message.block] = checker.snapshot()
        return learned(queue, add(queue, message))

    patch.setattr(UpdateQueue, "add", add_noted)
    patch.setattr(UpdateQueue, "updated", lambda queue, step: learned(queue, updated(queue, step)))


def _follow_transfers(checker: RaceChecker, memory: Memory, patch: pytest.MonkeyPatch) -> None:
    """Follows transfers of the SSDs. Each is an agent of its own, whichever thread moves its bytes."""
    add, submit, complete, finish = (getattr(IoScheduler, name) for name in ("_add", "_submit", "_complete", "_finish"))
    agents: dict[TransferJob, Agent] = {}

    def add_noted(scheduler: IoScheduler, job: TransferJob) -> None:
        agents[job] = checker.begin_transfer(str(job))
        add(scheduler, job)

    def note(scheduler: IoScheduler, piece: Piece) -> None:
        region = memory.arena_at(str(scheduler._arena.path))
        if region is None:
            return
        start = piece.segments[0].span.offset
        there = [(region, start, start + piece.nbytes)]
        agent, is_read = agents[piece.job], piece.job.is_read
        checker.access(agent, f"an SSD's {piece.job.verb}", [] if is_read else there, there if is_read else [])

    def submit_noted(scheduler: IoScheduler, engine: Any, piece: Piece) -> None:
        note(scheduler, piece)
        submit(scheduler, engine, piece)

    def complete_noted(scheduler: IoScheduler, transfer: Any, end_s: float) -> None:
        note(scheduler, transfer.tag)
        complete(scheduler, transfer, end_s)

    def finish_noted(scheduler: IoScheduler, job: TransferJob) -> None:
        agent = agents.pop(job)
        last = agent.period
        with checker.acting_as(agent):
            finish(scheduler, job)
        checker.end_transfer(agent, last)

    for name, noted in (
        ("_add", add_noted), ("_submit", submit_noted), ("_complete", complete_noted), ("_finish", finish_noted)
    ):  # fmt: skip
        patch.setattr(IoScheduler, name, noted)


def _follow_installed(memory: Memory, patch: pytest.MonkeyPatch) -> None:
    """Follows params while they are installed in a model's modules."""
    install, remove = BlockRunner.install, BlockRunner.remove
    hold, release, end_operation = PieceBuffers.hold, PieceBuffers.release, PieceBuffers.end
    installed: dict[tuple[int, int], list[Range]] = {}
    held: dict[tuple[int, int], list[Range]] = {}

    def begin(ranges: Sequence[Range]) -> list[Range]:
        for region, start, stop in ranges:
            region.installed.append((start, stop))
        return list(ranges)

    def end(ranges: Sequence[Range]) -> None:
        for region, start, stop in ranges:
            region.installed.remove((start, stop))

    def install_noted(runner: BlockRunner, block: Any, flats: Any, grads: Any) -> None:
        install(runner, block, flats, grads)
        params = [flat for flat in flats.values() if isinstance(flat, torch.Tensor)]
        installed[id(runner), block] = begin(memory.ranges_of(params))

    def remove_noted(runner: BlockRunner, block: Any) -> None:
        end(installed.pop((id(runner), block), []))
        remove(runner, block)

    def hold_noted(buffers: PieceBuffers, piece: int, *, backward: bool) -> torch.Tensor:
        flat = hold(buffers, piece, backward=backward)
        held.setdefault((id(buffers), piece), []).extend(begin(memory.ranges_of([flat])))
        return flat

    def release_noted(buffers: PieceBuffers, piece: int) -> None:
        end([held[id(buffers), piece].pop()])
        release(buffers, piece)

    def end_noted(buffers: PieceBuffers) -> None:
        for key in [key for key in held if key[0] == id(buffers)]:
            end(held.pop(key))
        end_operation(buffers)

    borrow, give_back = OffloadedParams.borrow, OffloadedParams.give_back
    borrowed: dict[tuple[int, int], list[Range]] = {}

    def borrow_noted(feed: OffloadedParams, block: Any, *, is_backward: bool) -> torch.Tensor:
        flat = borrow(feed, block, is_backward=is_backward)
        borrowed.setdefault((id(feed), block.index), []).extend(begin(memory.ranges_of([flat])))
        return flat

    def give_back_noted(feed: OffloadedParams, block: Any) -> None:
        end([borrowed[id(feed), block.index].pop()])
        give_back(feed, block)

    patch.setattr(OffloadedParams, "borrow", borrow_noted)
    patch.setattr(OffloadedParams, "give_back", give_back_noted)
    patch.setattr(BlockRunner, "install", install_noted)
    patch.setattr(BlockRunner, "remove", remove_noted)
    patch.setattr(PieceBuffers, "hold", hold_noted)
    patch.setattr(PieceBuffers, "release", release_noted)
    patch.setattr(PieceBuffers, "end", end_noted)
