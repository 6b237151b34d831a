"""Tells the checker of accesses: by torch's operators, copies, update kernels, SSD transfers, and owners of slots."""

import sys
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.support.races.checker import INNER, RaceChecker, place_of
from tests.support.races.clocks import Agent, Clock
from tests.support.races.cuda import DEVICE, RecordedCuda
from tests.support.races.memory import Region
from windlass.actors.activations.parts import Part
from windlass.actors.activations.ssd_store import SsdActivations
from windlass.actors.messages import GradOffloaded
from windlass.actors.offload.param_prefetcher import ParamFeed as OffloadedParams
from windlass.actors.policy.worker_queues import UpdateActions, UpdateQueue
from windlass.engine.device import device as device_module
from windlass.engine.device.device import Device
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.streamed_params import PieceBuffers
from windlass.engine.optimizer.adam_kernel import ChunkStates, OptimizerKernel
from windlass.engine.optimizer.grad_norm import squared_norm
from windlass.storage.ids import Span
from windlass.storage.io_scheduler.scheduler import IoScheduler
from windlass.storage.io_scheduler.transfer_jobs import Piece, TransferJob
from windlass.storage.memory.arena import Arena, SlotPool

Range = tuple[Region, int, int]

# Operators that only describe memory.
_NO_ACCESS = frozenset(
    {"aten.set_", "aten.resize_", "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty"}
    | {"aten.new_empty_strided", "aten.is_pinned", "aten.lift_fresh", "aten._unsafe_view", "aten._reshape_alias"}
)
# Operators for which a GPU's host waits: their result is a number, or a tensor whose shape depends on the data.
_SYNCHRONIZING = frozenset(
    {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten._unique2"}
)


class Memory:
    """The regions of all storages and arenas, by address."""

    def __init__(self, checker: RaceChecker, compute: Agent) -> None:
        self._checker = checker
        self._compute = compute
        # With a reference that tells when a storage is freed; None for arenas.
        self._regions: dict[int, tuple[Region, Any]] = {}
        self._arenas: dict[str, Region] = {}
        self._num_storages = 0

    def add_arena(self, memory: torch.Tensor, name: str) -> Region:
        """Adds a mapping of an arena: all mappings of one name are the same bytes."""
        region = self._arenas.setdefault(name, Region("the arena"))
        self._regions[memory.untyped_storage().data_ptr()] = region, None
        self._checker.arena = region
        return region

    def region_of(self, tensor: torch.Tensor, *, on_device: bool = False) -> Region | None:
        """Returns the region of a tensor's storage, a new one if it is not known; None if it has no memory."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address:
            return None
        known = self._regions.get(address)
        if known is not None and (known[1] is None or known[1]() is storage):
            return known[0]
        self._num_storages += 1
        current = self._checker.current
        allocated_by = current if current.is_stream else self._compute
        on_device = on_device or current.is_stream
        place, _ = place_of(sys._getframe(1))
        kind = "device" if on_device else "host"
        region = Region(f"{kind} memory {self._num_storages} of {storage.nbytes()} bytes, allocated at {place}")
        checker = self._checker
        if on_device:
            region.on_device, region.allocated_by = True, allocated_by
            checker.allocated(region, storage.nbytes(), place)
        freed = (lambda _: checker.freed(region)) if on_device else (lambda _: None)
        self._regions[address] = region, weakref.ref(storage, freed)
        return region

    def region_at(self, address: int) -> Region | None:
        """Returns the region that begins at an address."""
        return self._regions[address][0] if address in self._regions else None

    def range_of(self, tensor: torch.Tensor, *, on_device: bool = False) -> Range | None:
        """Returns the bytes of a tensor, from its first to its last element."""
        if tensor.numel() == 0 or tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return None
        region = self.region_of(tensor, on_device=on_device)
        if region is None:
            return None
        start = int(tensor.storage_offset())
        stop = start + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return region, start * tensor.itemsize, stop * tensor.itemsize

    def ranges_of(self, tensors: Sequence[torch.Tensor]) -> list[Range]:
        """Returns the bytes of tensors that have any."""
        return [found for tensor in tensors if (found := self.range_of(tensor)) is not None]

    def agent_of(self, ranges: Sequence[Range]) -> Agent:
        """Returns the agent that accesses ranges now. Outside of a stream's work, kernels go to the default stream."""
        current = self._checker.current
        if current.is_stream or not any(region.on_device for region, _, _ in ranges):
            return current
        return self._compute

    def note(self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Notes the accesses of a piece of work."""
        read, written = self.ranges_of(reads), self.ranges_of(writes)
        place, _ = place_of(sys._getframe(1), INNER)
        self._checker.access(self.agent_of([*read, *written]), what, read, written, place)


class AccessMode(TorchDispatchMode):
    """Notes the accesses of each operator in its thread."""

    def __init__(self, checker: RaceChecker, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._checker = checker
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator. Pinned memory, which this machine does not have, is ordinary memory."""
        kwargs = dict(kwargs or {})
        name = str(getattr(func, "overloadpacket", func))
        if name == "aten._pin_memory":
            func, args, name = torch.ops.aten.clone.default, args[:1], "aten.clone"
            with self._checker.acting_as(self._checker.host):
                return self._noted(func, name, args, {}, on_device=False)
        if name == "aten.is_pinned":
            return False
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
            result = func(*args, **kwargs)
            with self._checker.acting_as(self._checker.host):
                self._memory.region_of(result)
            return result
        return self._noted(func, name, args, kwargs, on_device=kwargs.get("device") == DEVICE)

    def _noted(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], *, on_device: bool) -> Any:
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" for tensor in (*tensors, *outputs)):
            return result
        memory = self._memory
        reads, writes, fresh = _roles(func, args, kwargs, outputs)
        on_device = on_device or any(found[0].on_device for found in memory.ranges_of(tensors))
        made = [found for tensor in fresh if (found := memory.range_of(tensor, on_device=on_device)) is not None]
        if name in _NO_ACCESS:
            return result
        read, written = memory.ranges_of(reads), [*memory.ranges_of(writes), *made]
        if read or written:
            agent = memory.agent_of([*read, *written])
            self._checker.access(agent, name, read, written)
            if name in _SYNCHRONIZING and any(region.on_device for region, _, _ in read):
                self._checker.host_waits(sys._getframe(1), name)
                self._checker.learn(agent.clock.copy())
        return result


def _roles(
    func: Any, args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Returns what an operator reads, what it writes in place, and its results with memory of their own."""
    schema = func._schema
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    viewed = False
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if argument.alias_info is None:
            reads += tensors
        elif argument.alias_info.is_write:
            writes += tensors
            if not argument.is_out and not schema.name.endswith(("copy_", "zero_", "fill_")):
                reads += tensors
        else:
            viewed = True
    if viewed and not writes:
        return [], [], []  # a view
    known = {tensor.untyped_storage().data_ptr() for tensor in (*reads, *writes)}
    fresh = [tensor for tensor in outputs if tensor.untyped_storage().data_ptr() not in known]
    return reads, writes, fresh


def follow_accesses(checker: RaceChecker, cuda: RecordedCuda, patch: pytest.MonkeyPatch) -> Memory:
    """Lets all threads that start from now on tell the checker of their accesses."""
    memory = Memory(checker, cuda.default.agent)
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
    _follow_pools(checker, patch)
    _follow_holds(checker, memory, patch)
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


def _follow_holds(checker: RaceChecker, memory: Memory, patch: pytest.MonkeyPatch) -> None:
    """Follows tensors that a thread holds until its copies of them have ended."""
    leave = SsdActivations._leave

    def leave_noted(store: SsdActivations, part: Part) -> None:
        source = part.swap.source
        region = None if source is None else memory.region_of(source)
        leave(store, part)
        if region is not None:
            checker.let_go(region)

    patch.setattr(SsdActivations, "_leave", leave_noted)


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
    patch.setattr(UpdateQueue, "updated", lambda queue: learned(queue, updated(queue)))


def _follow_transfers(checker: RaceChecker, memory: Memory, patch: pytest.MonkeyPatch) -> None:
    """Follows transfers of the SSDs. Each is an agent of its own, whichever thread moves its bytes."""
    add, submit, complete, finish = (getattr(IoScheduler, name) for name in ("_add", "_submit", "_complete", "_finish"))
    agents: dict[TransferJob, Agent] = {}

    def add_noted(scheduler: IoScheduler, job: TransferJob) -> None:
        agents[job] = checker.begin_transfer(str(job))
        add(scheduler, job)

    def note(scheduler: IoScheduler, piece: Piece) -> None:
        region = memory._arenas.get(str(scheduler._arena.path))
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
