"""Which params stay in host memory from one use to the next.

A chunk's params are used in the forward pass, in the backward pass, by the update, and in the next forward pass. What
stays is what is needed soonest: the chunk whose next use is farthest away makes room. Each group of micro-batches goes
through all blocks as a step of one group does; only after the last one an update follows.
Source: Belady, A study of replacement algorithms for a virtual-storage computer (1966): the program is known here.
"""

import threading
from dataclasses import dataclass

from windlass.actors.context import JobContext
from windlass.actors.messages import ParamLoan, Phase
from windlass.storage.arena import SlotPool
from windlass.storage.ids import ChunkKey, Span, Step


@dataclass(slots=True)
class _Entry:
    span: Span
    step: Step | None  # whose params lie there; None while they are lent
    awaits_update: bool = False  # which will read them soon


class ParamCache:
    """Slots of a pool that are kept. Safe from many threads; a slot that is taken out is the taker's."""

    def __init__(self, slots: SlotPool, *, capacity: int, head: int, reads_params: bool) -> None:
        """`capacity`: chunks. `head`: the last block. `reads_params`: updates read them, while backward goes on."""
        self._slots = slots
        self._capacity = capacity
        self._head = head
        self._reads_params = reads_params
        self._entries: dict[ChunkKey, _Entry] = {}
        self._now = 0  # place of what was used last, in its group's way through the blocks
        self._lock = threading.Lock()

    @classmethod
    def of_job(cls, context: JobContext, slots: SlotPool) -> "ParamCache":
        """As large as the job's plan says."""
        formats = context.formats
        return cls(
            slots,
            capacity=context.plan.num_cached_params,
            head=len(context.layout.blocks) - 1,
            reads_params=formats.param_kind in formats.kinds_to_update and not context.spec.hyperparameters.keeps_grads,
        )

    def take(self, key: ChunkKey, step: Step) -> Span | None:
        """The slot that holds the params of `key` as `step` left them; None if there is none, or it is lent."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.step is None:
                return None
            del self._entries[key]
            if entry.step != step:
                self._slots.release([entry.span])
                return None
            return entry.span

    def put(self, key: ChunkKey, step: Step, span: Span, phase: Phase, *, is_last_group: bool) -> None:
        """Gives a slot to the cache after a use in `phase`: it is kept, or released. `is_last_group`: of the step."""
        with self._lock:
            self._now = self._place(key.block, phase)
            is_last_of_group = phase is Phase.BACKWARD or (phase is Phase.HEAD and key.block == self._head)
            awaits_update = is_last_of_group and is_last_group and self._reads_params
            entry = _Entry(span, step, awaits_update=awaits_update)
            if key in self._entries or not self._make_room(key, entry):
                self._slots.release([span])
            else:
                self._entries[key] = entry

    def lend(self, key: ChunkKey, from_step: Step) -> ParamLoan | None:
        """A slot for an optimizer to update the params of `key` in, with or without those of `from_step`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.step == from_step:
                entry.step = None
                return ParamLoan(key, entry.span, is_filled=True)
            if entry is not None:
                return None
            span = self._slot_for(key)
            if span is None:
                return None
            self._entries[key] = _Entry(span, None)
            return ParamLoan(key, span, is_filled=False)

    def take_back(self, key: ChunkKey, step: Step, span: Span) -> None:
        """A slot that was lent comes back, with the params of `step`."""
        with self._lock:
            entry = self._entries[key]
            assert entry.step is None, "what comes back was lent"
            assert entry.span == span
            entry.step, entry.awaits_update = step, False

    def _slot_for(self, key: ChunkKey) -> Span | None:
        """A free slot within the capacity, or that of something needed later; None if there is neither."""
        if len(self._entries) < self._capacity:
            spans = self._slots.try_acquire(1)
            if spans:
                return spans[0]
        victim = self._later_than(self._next_use(key, awaits_update=False))
        return None if victim is None else self._entries.pop(victim).span

    def _make_room(self, key: ChunkKey, entry: _Entry) -> bool:
        if len(self._entries) < self._capacity:
            return True
        victim = self._later_than(self._next_use(key, awaits_update=entry.awaits_update))
        if victim is None:
            return False
        self._slots.release([self._entries.pop(victim).span])
        return True

    def _later_than(self, use: int) -> ChunkKey | None:
        """What is not lent and needed last, if that is after `use`."""
        uses = {
            key: self._next_use(key, awaits_update=entry.awaits_update)
            for key, entry in self._entries.items()
            if entry.step is not None
        }
        last = max(uses, key=lambda key: uses[key], default=None)
        return None if last is None or uses[last] <= use else last

    def _place(self, block: int, phase: Phase) -> int:
        """In the order of a group: forward through the blocks, the head, backward. Evaluation comes before a step."""
        match phase:
            case Phase.FORWARD:
                return block
            case Phase.HEAD:
                return self._head
            case Phase.BACKWARD:
                return 2 * self._head - block
            case _:
                return -1

    def _next_use(self, key: ChunkKey, *, awaits_update: bool) -> int:
        forward, backward = key.block, 2 * self._head - key.block
        if awaits_update:
            return self._now
        if self._now < forward:
            return forward
        return backward if self._now < backward else forward + 2 * self._head + 1
