"""The chunks of a move on their way: from the SSDs of one box to another box, and from there to its new SSDs."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from windlass.actors.job import link_name
from windlass.actors.messages import Crossing, Message, OfferSpan, OfferTaken, PullSpan, SpanPulled
from windlass.actors.runtime.moving.division import ChunkMove, MoveSpec, packed_parts, slot_nbytes
from windlass.amounts import bytes_text
from windlass.engine.model import ModelLayout
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ChunkKey, Span, SsdIndex, StateKind
from windlass.storage.io_scheduler import CommitRequest, IoResult, IoScheduler, IoTerms
from windlass.storage.memory import SlotPool
from windlass.storage.store import CommitRecord

_SSD_PRIORITY = (0, 0)  # of reads and writes, which are all the same
_TICK_S = 1.0  # between two reports of progress, and two looks for a stuck SSD


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnds:
    """The slots, SSDs and link of a box, between which its chunks move."""

    leaving: SlotPool  # each slot has room for any chunk
    coming: SlotPool
    readers: Sequence[IoScheduler]  # of the SSDs that have the states now
    writers: Sequence[IoScheduler]  # of the SSDs that get some
    reader_of: Callable[[ChunkKey], SsdIndex]
    writer_of: Callable[[ChunkKey], SsdIndex]
    post: Callable[[Message], None]  # passes a message to the box's link


class ChunkTransfers:
    """Moves all chunks of one commit from and to one box. `take` and `fail` may be called by any thread."""

    def __init__(self, spec: MoveSpec, layout: ModelLayout, token: CancelToken) -> None:
        """`token` ends all waits."""
        self._spec = spec
        self._layout = layout
        self._token = token
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._open: dict[Crossing, Callable[[int], None]] = {}  # transfers of the link, with the calls at their end
        self._error: BaseException | None = None
        self._num_ios = 0  # of the SSDs, in flight
        self._last_io_s = 0.0  # when one of them has ended, or the first of them began
        self._num_done = 0  # chunks that are here, or have left
        self._come_nbytes = 0
        self._num_committed = 0  # SSDs that get states

    def run(self, ends: MoveEnds, commit: CommitRecord, check: Callable[[int], None]) -> None:
        """Moves all chunks, and commits those that come. `check` gets the bytes that have come, about each second.

        Raises:
            TimeoutError: the SSDs hang.
            The first error of a transfer, and those of `check`.
        """
        chunks = self._spec.chunks(self._layout)
        leaving = [each for each in chunks if each.source == self._spec.box != each.target]
        coming = [each for each in chunks if each.target == self._spec.box]
        for move, those, slots in ((self._send, leaving, ends.leaving), (self._receive, coming, ends.coming)):
            arguments = (self._move_all, move, those, slots, ends, commit)
            self._threads.append(threading.Thread(target=self._guarded, args=arguments, daemon=True))
            self._threads[-1].start()
        self._await(lambda: self._num_done == len(leaving) + len(coming), check)
        for writer in ends.writers:
            writer.commit(self._commit_request(commit))
        self._await(lambda: self._num_committed == len(ends.writers), check)

    def join(self) -> None:
        """Waits for the threads. The token is cancelled, or all chunks have moved."""
        for thread in self._threads:
            thread.join()

    def take(self, message: SpanPulled | OfferTaken) -> None:
        """Processes an answer of the link."""
        with self._changed:
            on_done = self._open.pop(message.crossing)
        on_done(message.nbytes if isinstance(message, SpanPulled) else 0)

    def fail(self, error: BaseException) -> None:
        """Ends `run` with an error, unless it has one already."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._token.cancel()

    # --- the threads --------------------------------------------------------------------------------------------------

    @staticmethod
    def _move_all(
        move: Callable[[ChunkMove, Span, MoveEnds, CommitRecord], None],
        chunks: Sequence[ChunkMove],
        slots: SlotPool,
        ends: MoveEnds,
        commit: CommitRecord,
    ) -> None:
        for each in chunks:
            (slot,) = slots.acquire(1)
            move(each, slot, ends, commit)

    def _send(self, chunk: ChunkMove, slot: Span, ends: MoveEnds, commit: CommitRecord) -> None:
        """Reads a chunk into a slot and offers it. The slot is free when the other box has it."""
        crossing = Crossing.of_params(commit.step, chunk.key)
        offer = OfferSpan(
            job=self._spec.any.job,
            step=commit.step,
            reply_to=link_name(self._spec.box),
            box=chunk.target,
            crossing=crossing,
            span=Span(slot.offset, slot_nbytes(self._parts(chunk.key))),
        )

        def taken(_: int) -> None:
            ends.leaving.release([slot])
            self._note_done(0)

        def read() -> None:
            self._begin(crossing, taken)
            ends.post(offer)

        self._read(chunk.key, slot, ends, commit, read)

    def _receive(self, chunk: ChunkMove, slot: Span, ends: MoveEnds, commit: CommitRecord) -> None:
        """Gets a chunk into a slot, from this box or another one, and writes it to its new SSD."""
        parts = self._parts(chunk.key)
        nbytes = slot_nbytes(parts)

        def written() -> None:
            ends.coming.release([slot])
            self._note_done(nbytes)

        def write(num_come: int = nbytes) -> None:
            if num_come != nbytes:
                raise ValueError(
                    f"the states of {chunk.key} are {bytes_text(num_come)} on box {self._spec.names[chunk.source]!r} "
                    f"and {bytes_text(nbytes)} here: the boxes have different versions or settings"
                )
            writer = ends.writers[ends.writer_of(chunk.key)]
            writer.write(chunk.key, commit.step, _at(parts, slot), self._terms(written))

        if chunk.source == self._spec.box:
            self._read(chunk.key, slot, ends, commit, write)
            return
        crossing = Crossing.of_params(commit.step, chunk.key)
        self._begin(crossing, write)
        ends.post(
            PullSpan(
                job=self._spec.any.job,
                step=commit.step,
                reply_to=link_name(self._spec.box),
                box=chunk.source,
                crossing=crossing,
                span=Span(slot.offset, nbytes),
            )
        )

    def _read(
        self, key: ChunkKey, slot: Span, ends: MoveEnds, commit: CommitRecord, on_done: Callable[[], None]
    ) -> None:
        reader = ends.readers[ends.reader_of(key)]
        reader.read(key, commit.step, _at(self._parts(key), slot), self._terms(on_done))

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

    def _begin(self, crossing: Crossing, on_done: Callable[[int], None]) -> None:
        with self._changed:
            self._open[crossing] = lambda nbytes: self._guarded(on_done, nbytes)

    def _note_done(self, nbytes: int) -> None:
        with self._changed:
            self._num_done += 1
            self._come_nbytes += nbytes
            self._changed.notify_all()

    def _commit_request(self, commit: CommitRecord) -> CommitRequest:
        def done(_: IoResult) -> None:
            with self._changed:
                self._num_committed += 1
                self._changed.notify_all()

        return CommitRequest(
            step=commit.step,
            attempt=self._spec.any.attempt,
            trainer_state=commit.trainer_state,
            on_done=done,
            on_failed=self.fail,
        )

    def _guarded(self, act: Callable[..., None], *arguments: object) -> None:
        try:
            act(*arguments)
        except BaseException as error:  # noqa: BLE001 - it ends `run`, which raises it
            self.fail(error)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _await(self, is_done: Callable[[], bool], check: Callable[[int], None]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error or is_done(), _TICK_S)
                if self._error is not None:
                    raise self._error
                if is_done():
                    return
                hangs = self._num_ios and time.monotonic() - self._last_io_s > self._spec.any.deadline_s
                nbytes = self._come_nbytes
            if hangs:
                raise TimeoutError(
                    f"no transfer of the SSDs of box {self._spec.name!r} has ended for "
                    f"{self._spec.any.deadline_s:g} s: check its disks"
                )
            check(nbytes)

    def _parts(self, key: ChunkKey) -> dict[StateKind, Span]:
        return packed_parts(self._layout, self._spec.any.training.formats, key)


def _at(parts: Mapping[StateKind, Span], slot: Span) -> list[tuple[StateKind, Span]]:
    return [(kind, Span(slot.offset + part.offset, part.nbytes)) for kind, part in parts.items()]
