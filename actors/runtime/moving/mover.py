"""One box's part in a move: it reads the states that it has, and writes those that it gets into new stores."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from windlass.actors.job import JobSpec, SsdFacts, link_name, store_geometry, survey_ssds
from windlass.actors.messages import ActorFailed, Crossing, Message, OfferSpan, OfferTaken, PullSpan, SpanPulled
from windlass.actors.runtime import free_memory_of, plan_attempt
from windlass.actors.runtime.moving.division import ChunkMove, MoveSpec, blocks_text, packed_parts, slot_nbytes
from windlass.amounts import bytes_text
from windlass.engine.model import ModelLayout
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ChunkKey, LayoutEpoch, Span, StateKind
from windlass.storage.io_scheduler import CommitRequest, IoResult, IoScheduler, IoTerms
from windlass.storage.memory import Arena, SlotPool, arena_path
from windlass.storage.store import CommitRecord, JobSpace, StoreJournal, delete_space, read_journal, read_space

_MAX_SLOTS = 8  # chunks on their way, to and from this box each
_SSD_PRIORITY = (0, 0)  # of reads and writes, which are all the same
_TICK_S = 1.0  # between two reports of progress, and two looks for a stuck SSD


class Mover:
    """Carries out the first box's calls on one box: `look`, `prepare`, `move` and `finish`, in this order.

    Only `take` is called by other threads.
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
        self._job = spec.any.job
        self.layout = layout
        self._direct = direct
        self._open_link = open_link
        self._on_progress = on_progress
        self._check_stop = check_stop
        self._io: dict[LayoutEpoch, tuple[SsdFacts, ...]] = {}
        self._token = CancelToken()
        self._resources = contextlib.ExitStack()
        self._old: list[JobSpace] = []
        self._new: list[JobSpace] = []
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._open: dict[Crossing, Callable[[int], None]] = {}  # transfers of the link, with the calls at their end
        self._error: BaseException | None = None
        self._num_ios = 0  # of the SSDs, in flight
        self._last_io_s = 0.0  # when one of them has ended, or the first of them began
        self._num_done = 0  # chunks that are here, or have left
        self._come_nbytes = 0
        self._committed: set[int] = set()  # SSDs of the new division

    # --- calls ------------------------------------------------------------------------------------------------------

    def look(self) -> tuple[tuple[StoreJournal, ...], tuple[StoreJournal, ...]]:
        """Returns the journals of the stores before the move, and of those after it. It changes nothing.

        Raises:
            StoreError: a store is damaged, or those before have other chunks.
        """
        old, new = self.spec.old, self.spec.new
        return tuple(self._journals(old)), tuple(self._journals(new))

    def prepare(self) -> tuple[StoreJournal, ...]:
        """Opens the stores that the box has, and makes empty ones for what it gets. Returns the former's journals.

        Older attempts cannot write any more then.

        Raises:
            PlanError, InsufficientSpaceError: the box has no room for the states that it gets, beside those it has.
        """
        if (new := self.spec.new) is not None:
            for name in new.ssd_dirs:
                delete_space(name, new.job, new.layout_epoch)  # of a move that was cut off
            context = plan_attempt(new, self.layout, direct=self._direct)
            self._io[new.layout_epoch] = context.ssds
            for index, name in enumerate(new.ssd_dirs):
                self._new.append(self._keep(JobSpace.create(name, context.geometry(index), direct=self._direct)))
                self._new[-1].store.resume_from(None)
        if (old := self.spec.old) is not None:
            self._io[old.layout_epoch] = survey_ssds(old, direct=self._direct)
            for index, name in enumerate(old.ssd_dirs):
                stored = read_space(name, old.job, old.layout_epoch, direct=self._direct)
                assert stored is not None, "the first box has read its journal"
                geometry = store_geometry(old, self._layout_of(old), stored[0].ssd_weights, index)
                self._old.append(self._keep(JobSpace.open(name, geometry, direct=self._direct)))
        self._create_slots()
        return tuple(self._named(space.journal()) for space in self._old)

    def _create_slots(self) -> None:
        """Creates the memory for chunks on their way, and opens the link."""
        largest = max(slot_nbytes(self._parts(each.key)) for each in self.spec.chunks(self.layout))
        budget = self.spec.any.host_memory_nbytes or free_memory_of(self.spec.any)
        num_slots = max(1, min(_MAX_SLOTS, budget // (2 * largest)))
        spec = self.spec.any
        path = arena_path(Path(spec.arena_dir), spec.job, spec.attempt)
        self._arena = Arena.create(path, 2 * num_slots * largest, check_stop=self._check_stop)
        self._resources.callback(self._arena.close)
        self._resources.callback(self._arena.unlink)
        self._leaving = SlotPool(0, largest, num_slots, name="chunks that leave", token=self._token)
        self._coming = SlotPool(num_slots * largest, largest, num_slots, name="chunks that come", token=self._token)
        self._post = self._open_link(self._arena)

    def move(self, commit: CommitRecord) -> tuple[StoreJournal, ...]:
        """Sends and receives all chunks of a commit, and commits what the box gets. Returns its new journals.

        Raises the first error of a transfer.
        """
        for space in self._old:
            space.store.resume_from(commit)
        readers = self._start_ios(self.spec.old, self._old)
        writers = self._start_ios(self.spec.new, self._new)
        chunks = self.spec.chunks(self.layout)
        leaving = [each for each in chunks if each.source == self.spec.box != each.target]
        coming = [each for each in chunks if each.target == self.spec.box]
        sender = threading.Thread(target=self._guarded, args=(self._send_all, leaving, readers, commit), daemon=True)
        receiver = threading.Thread(
            target=self._guarded, args=(self._receive_all, coming, readers, writers, commit), daemon=True
        )
        for thread in (sender, receiver):
            thread.start()
            self._resources.callback(thread.join)
        self._resources.callback(self._token.cancel)
        self._await(lambda: self._num_done == len(leaving) + len(coming))
        for index, writer in enumerate(writers):
            writer.commit(self._commit_request(commit, index))
        self._await(lambda: len(self._committed) == len(writers))
        return tuple(self._named(space.journal()) for space in self._new)

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
            self.fail(ConnectionError(message.error))
            return
        assert isinstance(message, SpanPulled | OfferTaken), f"the link sends no {type(message).__name__} to a mover"
        with self._changed:
            on_done = self._open.pop(message.crossing)
        on_done(message.nbytes if isinstance(message, SpanPulled) else 0)

    def fail(self, error: BaseException) -> None:
        """Ends `move` with an error, unless it has one already."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._token.cancel()

    # --- the threads of `move` ----------------------------------------------------------------------------------------

    def _send_all(self, chunks: list[ChunkMove], readers: list[IoScheduler], commit: CommitRecord) -> None:
        for each in chunks:
            (slot,) = self._leaving.acquire(1)
            self._send(each, slot, readers, commit)

    def _send(self, chunk: ChunkMove, slot: Span, readers: list[IoScheduler], commit: CommitRecord) -> None:
        """Reads a chunk into a slot and offers it. The slot is free when the other box has it."""
        parts = self._parts(chunk.key)
        crossing = Crossing.of_params(commit.step, chunk.key)

        def taken(_: int) -> None:
            self._leaving.release([slot])
            self._note_done(0)

        def offer() -> None:
            self._post(
                OfferSpan(
                    job=self._job,
                    step=commit.step,
                    reply_to=link_name(self.spec.box),
                    box=chunk.target,
                    crossing=self._begin(crossing, taken),
                    span=Span(slot.offset, slot_nbytes(parts)),
                )
            )

        self._read(chunk.key, parts, slot, readers, commit, offer)

    def _receive_all(
        self, chunks: list[ChunkMove], readers: list[IoScheduler], writers: list[IoScheduler], commit: CommitRecord
    ) -> None:
        for each in chunks:
            (slot,) = self._coming.acquire(1)
            self._receive(each, slot, readers, writers, commit)

    def _receive(
        self,
        chunk: ChunkMove,
        slot: Span,
        readers: list[IoScheduler],
        writers: list[IoScheduler],
        commit: CommitRecord,
    ) -> None:
        """Gets a chunk into a slot, from this box or another one, and writes it to its new SSD."""
        parts = self._parts(chunk.key)
        nbytes = slot_nbytes(parts)

        def written() -> None:
            self._coming.release([slot])
            self._note_done(nbytes)

        def write(num_come: int = nbytes) -> None:
            if num_come != nbytes:
                raise ValueError(
                    f"the states of {chunk.key} are {bytes_text(num_come)} on box {self.spec.names[chunk.source]!r} "
                    f"and {bytes_text(nbytes)} here: the boxes have different versions or settings"
                )
            ssd = self._new[0].store.geometry.ssd_of(chunk.key)
            writers[ssd].write(chunk.key, commit.step, _at(parts, slot), self._terms(written))

        if chunk.source == self.spec.box:
            self._read(chunk.key, parts, slot, readers, commit, write)
            return
        self._post(
            PullSpan(
                job=self._job,
                step=commit.step,
                reply_to=link_name(self.spec.box),
                box=chunk.source,
                crossing=self._begin(Crossing.of_params(commit.step, chunk.key), write),
                span=Span(slot.offset, nbytes),
            )
        )

    def _read(
        self,
        key: ChunkKey,
        parts: Mapping[StateKind, Span],
        slot: Span,
        readers: list[IoScheduler],
        commit: CommitRecord,
        on_done: Callable[[], None],
    ) -> None:
        ssd = self._old[0].store.geometry.ssd_of(key)
        readers[ssd].read(key, commit.step, _at(parts, slot), self._terms(on_done))

    def _terms(self, on_done: Callable[[], None]) -> IoTerms:
        with self._changed:
            if not self._num_ios:
                self._last_io_s = time.monotonic()
            self._num_ios += 1

        def done(_: IoResult) -> None:
            with self._changed:
                self._num_ios -= 1
                self._last_io_s = time.monotonic()
            self._guarded(on_done)

        return IoTerms(priority=_SSD_PRIORITY, on_done=done, on_failed=self.fail)

    def _begin(self, crossing: Crossing, on_done: Callable[[int], None]) -> Crossing:
        with self._changed:
            self._open[crossing] = lambda nbytes: self._guarded(on_done, nbytes)
        return crossing

    def _note_done(self, nbytes: int) -> None:
        with self._changed:
            self._num_done += 1
            self._come_nbytes += nbytes
            self._changed.notify_all()

    def _guarded(self, act: Callable[..., None], *arguments: object) -> None:
        try:
            act(*arguments)
        except BaseException as error:  # noqa: BLE001 - it ends `move`, which raises it
            self.fail(error)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _await(self, is_done: Callable[[], bool]) -> None:
        """Waits until something is done. Raises the error of a transfer, and TimeoutError if an SSD hangs."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error or is_done(), _TICK_S)
                if self._error is not None:
                    raise self._error
                if is_done():
                    return
                hangs = self._num_ios and time.monotonic() - self._last_io_s > self.spec.any.deadline_s
                nbytes = self._come_nbytes
            if hangs:
                names = " and ".join(sorted({str(space.volume.path) for space in (*self._old, *self._new)}))
                raise TimeoutError(f"no transfer of the SSDs {names} has ended for {self.spec.any.deadline_s:g} s")
            self._check_stop()
            self._on_progress(nbytes)

    def _commit_request(self, commit: CommitRecord, ssd: int) -> CommitRequest:
        def done(_: IoResult) -> None:
            with self._changed:
                self._committed.add(ssd)
                self._changed.notify_all()

        return CommitRequest(
            step=commit.step,
            attempt=self.spec.any.attempt,
            trainer_state=commit.trainer_state,
            on_done=done,
            on_failed=self.fail,
        )

    def _start_ios(self, spec: JobSpec | None, spaces: list[JobSpace]) -> list[IoScheduler]:
        schedulers = []
        for index, space in enumerate(spaces):
            assert spec is not None, "there are spaces of this division"
            name, io = f"ssd-{index} of epoch {spec.layout_epoch}", self._io[spec.layout_epoch][index].io
            schedulers.append(IoScheduler.start(name, space, self._arena, self._token, io))
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

    def _parts(self, key: ChunkKey) -> dict[StateKind, Span]:
        return packed_parts(self.layout, self.spec.any.training.formats, key)


def _at(parts: Mapping[StateKind, Span], slot: Span) -> list[tuple[StateKind, Span]]:
    return [(kind, Span(slot.offset + part.offset, part.nbytes)) for kind, part in parts.items()]
