"""One box's part in a move: the stores that it has and gets, and the memory for chunks on their way."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from windlass.actors.job import JobSpec, SsdFacts, store_geometry, survey_ssds
from windlass.actors.messages import ActorFailed, FailureKind, Message, OfferTaken, SpanPulled
from windlass.actors.runtime import free_memory_of, plan_attempt
from windlass.actors.runtime.moving.chunk_transfers import ChunkTransfers, MoveEnds
from windlass.actors.runtime.moving.division import MoveSpec, blocks_text, packed_parts, slot_nbytes
from windlass.actors.scheduler import ActorLostError
from windlass.engine.model import ModelLayout
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ChunkKey, LayoutEpoch, SsdIndex
from windlass.storage.io_scheduler import IoScheduler
from windlass.storage.memory import Arena, SlotPool, arena_path
from windlass.storage.store import CommitRecord, JobSpace, StoreJournal, delete_space, read_journal, read_space

_MAX_SLOTS = 8  # chunks on their way, to and from this box each


class Mover:
    """Carries out the first box's calls on one box: `look`, `prepare`, `move` and `finish`, in this order.

    Only `take` and `fail` are called by other threads.
    """

    def __init__(
        self,
        spec: MoveSpec,
        layout: ModelLayout,
        *,
        open_link: Callable[[Arena], Callable[[Message], None]],
        direct: bool = True,
        on_progress: Callable[[int], None] = lambda nbytes: None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`open_link` gets the memory from and to which the box's link moves bytes, and returns its `post`.

        The caller ends the link before `close`. `on_progress` gets the bytes that have come so far. `check_stop` raises
        an error if the move is to stop.
        """
        self.spec = spec
        self.layout = layout
        self._open_link = open_link
        self._direct = direct
        self._on_progress = on_progress
        self._check_stop = check_stop
        self._token = CancelToken()
        self._transfers = ChunkTransfers(spec, layout, self._token)
        self._resources = contextlib.ExitStack()
        self._old: list[tuple[JobSpace, SsdFacts]] = []
        self._new: list[tuple[JobSpace, SsdFacts]] = []

    # --- calls --------------------------------------------------------------------------------------------------------

    def look(self) -> tuple[tuple[StoreJournal, ...], tuple[StoreJournal, ...]]:
        """Returns the journals of the stores before the move, and of those after it. It changes nothing.

        Raises:
            StoreError: a store is damaged, or those before have other chunks.
        """
        return tuple(self._journals(self.spec.old)), tuple(self._journals(self.spec.new))

    def prepare(self) -> tuple[StoreJournal, ...]:
        """Opens the stores that the box has, and makes empty ones for what it gets. Returns the former's journals.

        Older attempts cannot write any more then.

        Raises:
            PlanError, InsufficientSpaceError: the box has no room for the states that it gets, beside those it has.
        """
        self._open_old()  # first, because it frees the scratch of the attempt before
        self._create_new()
        self._create_slots()
        return tuple(self._named(space.journal()) for space, _ in self._old)

    def move(self, commit: CommitRecord) -> tuple[StoreJournal, ...]:
        """Sends and receives all chunks of a commit, and commits what the box gets. Returns its new journals.

        Raises the errors of `ChunkTransfers.run`.
        """
        for space, _ in self._old:
            space.store.resume_from(commit)
        ends = MoveEnds(
            leaving=self._leaving,
            coming=self._coming,
            readers=self._start_ios(self._old),
            writers=self._start_ios(self._new),
            reader_of=lambda key: _ssd_of(self._old, key),
            writer_of=lambda key: _ssd_of(self._new, key),
            post=self._post,
        )
        self._resources.callback(self._transfers.join)
        self._resources.callback(self._token.cancel)
        self._transfers.run(ends, commit, self._check)
        return tuple(self._named(space.journal()) for space, _ in self._new)

    def finish(self, kept: LayoutEpoch) -> None:
        """Ends the transfers, and deletes the job's stores of the other division.

        `kept`: the layout epoch whose stores stay.
        """
        self.close()
        for spec in (self.spec.old, self.spec.new):
            if spec is not None and spec.layout_epoch != kept:
                for name in spec.ssd_dirs:
                    delete_space(name, spec.job, spec.layout_epoch)

    def close(self) -> None:
        """Ends all threads and closes all files. The stores stay. A second call does nothing."""
        self._token.cancel()
        self._resources.close()

    # --- messages of the link -----------------------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """Processes an answer of the link, or its failure."""
        if isinstance(message, ActorFailed):
            was_lost = message.kind in (FailureKind.UNFORESEEN, FailureKind.STALLED)
            self.fail(ActorLostError(message.error) if was_lost else ValueError(message.error))
            return
        assert isinstance(message, SpanPulled | OfferTaken), f"the link sends no {type(message).__name__} to a mover"
        self._transfers.take(message)

    def fail(self, error: BaseException) -> None:
        """Ends `move` with an error, unless it has one already."""
        self._transfers.fail(error)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check(self, nbytes: int) -> None:
        self._check_stop()
        self._on_progress(nbytes)

    def _open_old(self) -> None:
        if (old := self.spec.old) is None:
            return
        for index, (name, facts) in enumerate(zip(old.ssd_dirs, survey_ssds(old, direct=self._direct), strict=True)):
            stored = read_space(name, old.job, old.layout_epoch, direct=self._direct)
            assert stored is not None, "the first box has read its journal"
            geometry = store_geometry(old, self._layout_of(old), stored[0].ssd_weights, index)
            self._old.append((self._keep(JobSpace.open(name, geometry, direct=self._direct)), facts))

    def _create_new(self) -> None:
        if (new := self.spec.new) is None:
            return
        for name in new.ssd_dirs:
            delete_space(name, new.job, new.layout_epoch)  # of a move that was cut off
        context = plan_attempt(new, self.layout, direct=self._direct)
        for index, (name, facts) in enumerate(zip(new.ssd_dirs, context.ssds, strict=True)):
            space = self._keep(JobSpace.create(name, context.geometry(index), direct=self._direct))
            space.store.resume_from(None)
            self._new.append((space, facts))

    def _create_slots(self) -> None:
        """Creates the memory for chunks on their way, and opens the link."""
        spec, formats = self.spec.any, self.spec.any.training.formats
        largest = max(
            slot_nbytes(packed_parts(self.layout, formats, key)) for key, _, _ in self.spec.chunks(self.layout)
        )
        budget = spec.host_memory_nbytes or free_memory_of(spec)
        num_slots = max(1, min(_MAX_SLOTS, budget // (2 * largest)))
        path = arena_path(Path(spec.arena_dir), spec.job, spec.attempt)
        arena = Arena.create(path, 2 * num_slots * largest, check_stop=self._check_stop)
        self._resources.callback(arena.close)
        self._resources.callback(arena.unlink)
        self._arena = arena
        self._leaving = SlotPool(0, largest, num_slots, name="chunks that leave", token=self._token)
        self._coming = SlotPool(num_slots * largest, largest, num_slots, name="chunks that come", token=self._token)
        self._post = self._open_link(arena)

    def _start_ios(self, stores: list[tuple[JobSpace, SsdFacts]]) -> list[IoScheduler]:
        schedulers = []
        for index, (space, facts) in enumerate(stores):
            name = f"ssd-{index} of epoch {space.store.geometry.epoch}"
            schedulers.append(IoScheduler.start(name, space, self._arena, self._token, facts.io))
            self._resources.callback(schedulers[-1].close)
        return schedulers

    def _keep(self, space: JobSpace) -> JobSpace:
        self._resources.callback(space.close)
        return space

    def _journals(self, spec: JobSpec | None) -> Iterator[StoreJournal]:
        """Yields the journals of a division. Stores after the move that have other chunks are left of another one."""
        for index, name in enumerate(() if spec is None else spec.ssd_dirs):
            assert spec is not None
            stored = read_space(name, spec.job, spec.layout_epoch, direct=self._direct)
            records: tuple[CommitRecord, ...] = ()
            if stored is not None:
                found, journal = stored
                wanted = store_geometry(spec, self._layout_of(spec), found.ssd_weights, index)
                if replace(found, attempt=wanted.attempt) == wanted:
                    records = journal.records
                elif spec is self.spec.old:
                    records = read_journal(name, wanted, direct=self._direct).records  # raises, with the differences
            yield self._named(StoreJournal(f"SSD {name}", records))

    def _named(self, journal: StoreJournal) -> StoreJournal:
        holder = self.spec.holders[self.spec.box]
        has = "" if holder is None else f" ({blocks_text(holder, len(self.layout.blocks))})"
        return replace(journal, where=f"{journal.where} of box {self.spec.name!r}{has}")

    def _layout_of(self, spec: JobSpec) -> ModelLayout:
        stages = self.spec.holders if spec is self.spec.old else self.spec.owners
        stage = stages[self.spec.box]
        assert stage is not None, "a box with a specification has blocks"
        return self.layout.of_blocks(*stage)


def _ssd_of(stores: list[tuple[JobSpace, SsdFacts]], key: ChunkKey) -> SsdIndex:
    return stores[0][0].store.geometry.ssd_of(key)
