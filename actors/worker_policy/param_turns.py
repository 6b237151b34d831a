"""The decisions about the slots through which params pass from the SSDs to the GPU workers of a box.

A chunk is read once for a use, however many GPU workers copy it, and stays in its slot until the last one has. So the
SSDs read no more for several GPU workers than for one. A GPU worker that is ahead may fill slots for the others, but
never the last ones: a use that all GPU workers have asked for can always go on. So slots cannot run out for good,
whatever the speeds.

Pure: the actor that reads params and the simulator drive the same class.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from windlass.actors.messages import ParamChunk, ParamsCopied, ParamUse, RequestParams
from windlass.storage.ids import ActorName, ChunkKey, Span, Step


@dataclass(frozen=True, slots=True)
class ParamRead:
    """Chunks to read for a use."""

    use: ParamUse
    step: Step  # under which the SSDs store them
    spans: Mapping[ChunkKey, Span]


@dataclass(slots=True)
class ParamActions:
    """The next reads, and the chunks that GPU workers can copy."""

    reads: list[ParamRead] = field(default_factory=list)
    arrived: list[tuple[ActorName, ParamUse, tuple[ParamChunk, ...]]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Fill:
    """A cached chunk that is read for the first time."""

    use: ParamUse  # the first one
    step: Step
    waiting: list[tuple[ActorName, ParamUse]] = field(default_factory=list)
    slot: Span | None = None  # set while it is read


@dataclass(slots=True, eq=False)
class _Use:
    """One use of a block's params, until all its slots are free."""

    use: ParamUse
    step: Step
    num_users: int
    num_missing: int  # GPU workers that have sent no request
    num_fronts: int = 0  # GPU workers for which all that they have asked for before is read
    wanted: dict[ActorName, set[ChunkKey]] = field(default_factory=dict)  # what each still has to copy
    to_read: list[ChunkKey] = field(default_factory=list)  # in order
    reading: dict[ChunkKey, Span] = field(default_factory=dict)  # the slot of each chunk on its way
    slots: dict[ChunkKey, Span] = field(default_factory=dict)  # those of chunks that have arrived

    @property
    def num_held(self) -> int:
        return len(self.reading) + len(self.slots)

    @property
    def is_due(self) -> bool:
        """True if it may take the last slots.

        All GPU workers have asked for it, and all that they have asked for before is read. Else one could hold the last
        slots until it has computed something for which it, or another one whose sums it needs, waits for slots.
        """
        return self.num_fronts == self.num_users

    @property
    def is_over(self) -> bool:
        return not (self.num_missing or self.to_read or self.num_held)


class ParamTurns:
    """The slots, and the uses that wait for some or have some. Not thread-safe."""

    def __init__(
        self, slots: Sequence[Span], *, batch: int, num_kept: int, cached: Mapping[ChunkKey, Span] | None = None
    ) -> None:
        """Takes over the slots.

        Args:
            slots: to be used for any chunk.
            batch: the largest number of chunks in a read.
            num_kept: slots that are kept free for uses that all GPU workers have asked for. It is at least `batch`, and
                the number of chunks that must be in slots together.
            cached: the slots of chunks whose params stay in host memory. They are read once. Until it has arrived, such
                a chunk holds a slot of the others, because more requests in the queues of the SSDs could time out.
        """
        self._free = list(reversed(slots))  # a stack: the slot that was released last is most likely in the CPU's cache
        self._batch = batch
        self._max_ahead = len(slots) - num_kept
        self._cached = cached or {}
        self._filled: set[ChunkKey] = set()
        self._fills: dict[ChunkKey, _Fill] = {}  # of cached chunks that were requested and have not arrived
        self._uses: dict[ParamUse, _Use] = {}  # in order of the first request; if all have come, of the last one
        self._unread: dict[ActorName, deque[_Use]] = {}  # what each has asked for; the first ones may have been read

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def request(self, request: RequestParams) -> ParamActions:
        """Adds a GPU worker's request."""
        actions = ParamActions()
        there: dict[ChunkKey, Span] = {}
        for key in request.keys:
            if key in self._filled:
                there[key] = self._cached[key]
            elif key in self._cached:
                fill = self._fills.setdefault(key, _Fill(request.use, request.step))
                fill.waiting.append((request.reply_to, request.use))
        if request.num_users:
            there |= self._join(request)
        if there:
            self._tell(actions, request.reply_to, request.use, there)
        self._begin(actions)
        return actions

    def arrived(self, name: ParamUse, key: ChunkKey) -> ParamActions:
        """Records that a chunk was read."""
        actions = ParamActions()
        if (fill := self._fills.pop(key, None)) is not None:
            assert fill.slot is not None, "only what is being read arrives"
            self._free.append(fill.slot)
            self._filled.add(key)
            for actor, use in fill.waiting:
                self._tell(actions, actor, use, {key: self._cached[key]})
        else:
            of_use = self._uses[name]
            slot = of_use.slots[key] = of_use.reading.pop(key)
            for actor, wanted in of_use.wanted.items():
                if key in wanted:
                    self._tell(actions, actor, name, {key: slot})
        self._begin(actions)
        return actions

    def copied(self, message: ParamsCopied) -> ParamActions:
        """Records that a GPU worker has copied chunks from slots."""
        use, actions = self._uses[message.use], ParamActions()
        use.wanted[message.actor].difference_update(message.keys)
        self._release(use, message.keys)
        self._begin(actions)
        return actions

    def describe(self) -> str:
        """Describes whom the oldest use in slots waits for; empty if no slot is in use."""
        for use in self._uses.values():
            if use.slots:
                names = [actor for actor, wanted in use.wanted.items() if wanted]
                behind = [actor for actor in self._unread if actor not in use.wanted]
                whom = f"to be copied by {', '.join(names)}" if names else "for a GPU worker that is behind"
                if behind and not names:
                    whom += f", such as {' or '.join(behind)}"
                return f"params of block {use.use.block} for step {use.use.step} wait {whom}"
        return ""

    # --- inside -----------------------------------------------------------------------------------------------------

    def _tell(self, actions: ParamActions, actor: ActorName, use: ParamUse, spans: Mapping[ChunkKey, Span]) -> None:
        chunks = tuple(ParamChunk(key, span, key not in self._cached) for key, span in spans.items())
        actions.arrived.append((actor, use, chunks))

    def _join(self, request: RequestParams) -> dict[ChunkKey, Span]:
        """Adds a GPU worker to a use. Returns the chunks that have arrived."""
        use = self._uses.get(request.use)
        if use is None:
            use = self._uses[request.use] = _Use(request.use, request.step, request.num_users, request.num_users)
        use.num_missing -= 1
        if not use.num_missing:  # its turn comes before that of uses for which some GPU worker is behind
            self._uses[request.use] = self._uses.pop(request.use)
        wanted = [key for key in request.keys if key not in self._cached]
        if wanted and not use.num_held:
            use.to_read = list(wanted)
        unread = self._unread.setdefault(request.reply_to, deque())
        unread.append(use)
        use.num_fronts += len(unread) == 1
        use.wanted[request.reply_to] = set(wanted)
        self._release(use, list(use.slots))
        return {key: span for key, span in use.slots.items() if key in use.wanted[request.reply_to]}

    def _release(self, use: _Use, keys: Collection[ChunkKey]) -> None:
        """Releases those slots that no GPU worker will copy from, and forgets a use that is over."""
        if not use.num_missing:
            for key in keys:
                if key in use.slots and not any(key in wanted for wanted in use.wanted.values()):
                    self._free.append(use.slots.pop(key))
        if use.is_over:
            del self._uses[use.use]

    def _begin(self, actions: ParamActions) -> None:
        """Begins reads in order: first of uses that all GPU workers have asked for, then of those that are ahead."""
        while (read := self._next_read()) is not None:
            actions.reads.append(read)

    def _next_read(self) -> ParamRead | None:
        if not self._free:
            return None
        if self._fills and (fills := [key for key, fill in self._fills.items() if fill.slot is None]):
            return self._read_cached(fills[: min(self._batch, len(self._free))])
        self._let_pass()
        first: _Use | None = None
        for use in self._uses.values():
            if use.to_read and use.is_due:
                num_chunks = min(self._batch, len(use.to_read))
                return self._read(use, num_chunks) if num_chunks <= len(self._free) else None
            if use.to_read and first is None:
                first = use
        if first is None:
            return None
        num_ahead = sum(use.num_held for use in self._uses.values() if not use.is_due)
        num_chunks = min(self._batch, len(first.to_read), len(self._free), self._max_ahead - num_ahead)
        return self._read(first, num_chunks) if num_chunks > 0 else None

    def _read_cached(self, keys: Sequence[ChunkKey]) -> ParamRead:
        first = self._fills[keys[0]]
        together = [key for key in keys if self._fills[key].step == first.step]
        for key in together:
            self._fills[key].slot = self._free.pop()
        return ParamRead(first.use, first.step, {key: self._cached[key] for key in together})

    def _let_pass(self) -> None:
        """Lets each GPU worker's next use come to the front, once the one before it is read."""
        for uses in self._unread.values():
            while uses and not uses[0].num_missing and not uses[0].to_read:
                uses.popleft()
                if uses:
                    uses[0].num_fronts += 1

    def _read(self, use: _Use, num_chunks: int) -> ParamRead:
        keys, use.to_read = use.to_read[:num_chunks], use.to_read[num_chunks:]
        slots = {key: self._free.pop() for key in keys}
        use.reading |= slots
        return ParamRead(use.use, use.step, slots)
