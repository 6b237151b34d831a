"""Tells the checker of the accesses of torch's operators, and knows the memory of every storage and arena."""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.host_waits import host_wait_of
from tests.support.races.checker import INNER, RaceChecker, place_of
from tests.support.races.clocks import Agent
from tests.support.races.cuda import DEVICES
from tests.support.races.memory import Region

Range = tuple[Region, int, int]

# Operators that only describe memory.
_NO_ACCESS = frozenset(
    {"aten.set_", "aten.resize_", "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty"}
    | {"aten.new_empty_strided", "aten.is_pinned", "aten.lift_fresh", "aten._unsafe_view", "aten._reshape_alias"}
)


class Memory:
    """The regions of all storages and arenas, by address."""

    def __init__(self, checker: RaceChecker, default_of: Callable[[torch.device], Agent]) -> None:
        """`default_of` returns the default stream of a device."""
        self.default_of = default_of
        self._checker = checker
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

    def arena_at(self, name: str) -> Region | None:
        """Returns the region of an arena."""
        return self._arenas.get(name)

    def region_of(self, tensor: torch.Tensor, *, on_device: Agent | None = None) -> Region | None:
        """Returns the region of a tensor's storage, a new one if it is not known; None if it has no memory.

        `on_device`: the default stream of the device, if it is not the one of the present stream's work.
        """
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address:
            return None
        known = self._regions.get(address)
        if known is not None and (known[1] is None or known[1]() is storage):
            return known[0]
        self._num_storages += 1
        current = self._checker.current
        allocated_by = current if current.is_stream else on_device
        on_device = current.default if current.is_stream else on_device
        place, _ = place_of(sys._getframe(1))
        kind = "device" if on_device else "host"
        region = Region(f"{kind} memory {self._num_storages} of {storage.nbytes()} bytes, allocated at {place}")
        checker = self._checker
        if on_device:
            region.on_device, region.allocated_by = on_device, allocated_by
            checker.allocated(region, storage.nbytes(), place)
        freed = (lambda _: checker.freed(region)) if on_device else (lambda _: None)
        self._regions[address] = region, weakref.ref(storage, freed)
        return region

    def region_at(self, address: int) -> Region | None:
        """Returns the region that begins at an address."""
        return self._regions[address][0] if address in self._regions else None

    def range_of(self, tensor: torch.Tensor, *, on_device: Agent | None = None) -> Range | None:
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
        if current.is_stream:
            return current
        return next((region.on_device for region, _, _ in ranges if region.on_device), current)

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
                return self._noted(func, name, args, {}, on_device=None)
        if name == "aten.is_pinned":
            return False
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
            result = func(*args, **kwargs)
            with self._checker.acting_as(self._checker.host):
                self._memory.region_of(result)
            return result
        device = kwargs.get("device")
        return self._noted(
            func, name, args, kwargs, on_device=self._memory.default_of(device) if device in DEVICES else None
        )

    def _noted(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], *, on_device: Agent | None) -> Any:
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" for tensor in (*tensors, *outputs)):
            return result
        memory = self._memory
        reads, writes, fresh = _roles(func, args, kwargs, outputs)
        known = (region.on_device for region, _, _ in memory.ranges_of(tensors) if region.on_device)
        on_device = on_device or next(known, None)
        made = [found for tensor in fresh if (found := memory.range_of(tensor, on_device=on_device)) is not None]
        if name in _NO_ACCESS:
            return result
        read, written = memory.ranges_of(reads), [*memory.ranges_of(writes), *made]
        if read or written:
            agent = memory.agent_of([*read, *written])
            self._checker.access(agent, name, read, written)
            if host_wait_of(func, args, kwargs) is not None and any(region.on_device for region, _, _ in read):
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
