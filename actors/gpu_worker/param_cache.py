"""A cache of params in host memory, from one use to the next.

A chunk's params are used in the forward pass, in the backward pass, by the update, and in the next forward pass. The
chunk whose next use is farthest away is evicted. Each group of micro-batches passes through all blocks; the update
follows only after the last group.
Source: Belady, A study of replacement algorithms for a virtual-storage computer (1966). The future uses are known here.
"""

import threading
from dataclasses import dataclass

from windlass.actors.job import CoreContext
from windlass.actors.messages import ParamSlotLease, Phase
from windlass.storage.ids import BlockIndex, ChunkKey, Span, Step
from windlass.storage.memory import SlotPool


@dataclass(slots=True)
class _Entry:
    span: Span
    step: Step | None  # the step whose params the slot holds; None while it is leased
    awaits_update: bool = False  # an update will read the params soon

    @property
    def may_make_room(self) -> bool:
        """True if the entry can be evicted: it is not leased, and no update will read it soon."""
        return self.step is not None and not self.awaits_update


class ParamCache:
    """The cached slots of a pool. Thread-safe. A caller that takes a slot owns it."""

    def __init__(self, slots: SlotPool, *, capacity: int, head: int, reads_params: bool) -> None:
        """`capacity` is in chunks. `head` is the last block.

        `reads_params`: updates read the params, and run during the backward pass.
        """
        self._slots = slots
        self._capacity = capacity
        self._head = head
        self._reads_params = reads_params
        self._entries: dict[ChunkKey, _Entry] = {}
        # The chunks that can be evicted, by block, because all chunks of a block are needed at the same time.
        self._replaceable: dict[BlockIndex, dict[ChunkKey, None]] = {}
        self._now = 0  # position of the last use in its group's pass through the blocks; see `_place`
        self._lock = threading.Lock()

    @classmethod
    def of_job(cls, context: CoreContext, slots: SlotPool) -> "ParamCache":
        """Creates the cache with the size in the job's plan."""
        formats = context.formats
        return cls(
            slots,
            capacity=context.plan.num_cached_params,
            head=len(context.layout.blocks) - 1,
            reads_params=formats.param_kind in formats.kinds_to_update and not context.spec.training.keeps_grads,
        )

    def take(self, key: ChunkKey, step: Step) -> Span | None:
        """Takes the slot with the params of `key` as of `step` out of the cache; None if it is missing or leased."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.step is None:
                return None
            self._remove(key)
            if entry.step != step:
                self._slots.release([entry.span])
                return None
            return entry.span

    def put(self, key: ChunkKey, step: Step, span: Span, phase: Phase, *, is_last_group: bool) -> None:
        """Puts a slot into the cache after a use in `phase`, or releases it. `is_last_group`: of the step."""
        with self._lock:
            self._now = self._place(key.block, phase)
            is_last_of_group = phase is Phase.BACKWARD or (phase is Phase.HEAD and key.block == self._head)
            awaits_update = is_last_of_group and is_last_group and self._reads_params
            entry = _Entry(span, step, awaits_update=awaits_update)
            if key in self._entries or not self._make_room(key, entry):
                self._slots.release([span])
            else:
                self._keep(key, entry)

    def lend(self, key: ChunkKey, from_step: Step) -> ParamSlotLease | None:
        """Leases a slot to an optimizer that updates the params of `key`; None if there is no slot.

        The slot may already hold the params of `from_step`.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.step == from_step:
                entry.step = None
                self._keep(key, entry)
                return ParamSlotLease(key, entry.span, is_filled=True)
            if entry is not None:
                return None
            span = self._slot_for(key)
            if span is None:
                return None
            self._keep(key, _Entry(span, None))
            return ParamSlotLease(key, span, is_filled=False)

    def take_back(self, key: ChunkKey, step: Step, span: Span) -> None:
        """Takes back a leased slot, which holds the params of `step`."""
        with self._lock:
            entry = self._entries[key]
            assert entry.step is None, "only a leased slot comes back"
            assert entry.span == span
            entry.step, entry.awaits_update = step, False
            self._keep(key, entry)

    def _keep(self, key: ChunkKey, entry: _Entry) -> None:
        self._entries[key] = entry
        if entry.may_make_room:
            self._replaceable.setdefault(key.block, {})[key] = None
        else:
            self._cannot_make_room(key)

    def _remove(self, key: ChunkKey) -> Span:
        self._cannot_make_room(key)
        return self._entries.pop(key).span

    def _cannot_make_room(self, key: ChunkKey) -> None:
        of_block = self._replaceable.get(key.block, {})
        of_block.pop(key, None)
        if not of_block:
            self._replaceable.pop(key.block, None)

    def _slot_for(self, key: ChunkKey) -> Span | None:
        """Returns a free slot within the capacity, or that of a chunk needed later; None if there is neither."""
        if len(self._entries) < self._capacity:
            spans = self._slots.try_acquire(1)
            if spans:
                return spans[0]
        victim = self._later_than(self._next_use(key.block, awaits_update=False))
        return None if victim is None else self._remove(victim)

    def _make_room(self, key: ChunkKey, entry: _Entry) -> bool:
        if len(self._entries) < self._capacity:
            return True
        victim = self._later_than(self._next_use(key.block, awaits_update=entry.awaits_update))
        if victim is None:
            return False
        self._slots.release([self._remove(victim)])
        return True

    def _later_than(self, use: int) -> ChunkKey | None:
        """Returns the chunk whose next use is farthest away, if it can be evicted and that use is after `use`."""
        last = max(self._replaceable, key=lambda block: self._next_use(block, awaits_update=False), default=None)
        if last is None or self._next_use(last, awaits_update=False) <= use:
            return None
        return next(iter(self._replaceable[last]))

    def _place(self, block: int, phase: Phase) -> int:
        """Returns the position of a use in a group's pass: forward, head, backward. Evaluation has the position -1."""
        match phase:
            case Phase.FORWARD:
                return block
            case Phase.HEAD:
                return self._head
            case Phase.BACKWARD:
                return 2 * self._head - block
            case _:
                return -1

    def _next_use(self, block: BlockIndex, *, awaits_update: bool) -> int:
        forward, backward = block, 2 * self._head - block
        if awaits_update:
            return self._now
        if self._now < forward:
            return forward
        return backward if self._now < backward else forward + 2 * self._head + 1
