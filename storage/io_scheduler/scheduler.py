"""The I/O scheduler of one SSD: moves bytes between the SSD and the arena in order of priority, and commits steps.

Its threads spend most time in system calls that release the GIL, and a little in checksums.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ChunkKey, Span, StateKind, Step
from windlass.storage.integrity import StoreError
from windlass.storage.io import DEFAULT_IO, IoSettings, Transfer, TransferEngine, open_engine
from windlass.storage.io_scheduler.commit_gate import CommitGate
from windlass.storage.io_scheduler.requests import CommitRequest, IoResult, IoTerms
from windlass.storage.io_scheduler.transfer_jobs import ChunkJob, Piece, ScratchJob, TransferJob, cut
from windlass.storage.memory import Arena
from windlass.storage.priority_queue import PriorityQueue
from windlass.storage.store import JobSpace
from windlass.storage.threads import GuardedThreads, works_at

_CLOSE_DEADLINE_S = 60.0  # seconds that `close` waits for the threads
# Limit of transfers that are queued or in flight. The callers' slots limit them as well; this limit stops callers with
# a defect.
_MAX_OPEN = 4096


class IoScheduler:
    """Serves one SSD to the workers of a job. All methods but `close` may be called by any thread, also in callbacks.

    A span named in a request belongs to the scheduler until it calls `on_done`. It never does so for a transfer that
    failed. Therefore late bytes cannot arrive in memory that has a new owner.
    """

    def __init__(
        self,
        name: str,
        space: JobSpace,
        arena: Arena,
        token: CancelToken,
        io: IoSettings,
        engines: list[TransferEngine],
        *,
        checksums: bool,
        max_open: int,
    ) -> None:
        """Internal: use `start`."""
        self._space = space
        self._arena = arena
        self._token = token
        self._io = io
        self._checksums = checksums
        self._max_open = max_open
        self._idle_engines = engines  # one for each transfer thread, until that starts
        self._threads = GuardedThreads(name, space.store.geometry.job, self._end_broken)
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._queue: PriorityQueue[TransferJob] = PriorityQueue()
        self._open: set[TransferJob] = set()  # queued or in flight
        self._gate = CommitGate()
        self._held: list[TransferJob] = []  # writes that wait for the decision on the last commit
        self._num_arrived = 0
        self._closing = False
        self._is_broken = False  # a thread has died, so its transfers will never be done
        self._bytes_read = 0
        self._bytes_written = 0

    @classmethod
    def start(
        cls,
        name: str,
        space: JobSpace,
        arena: Arena,
        token: CancelToken,
        io: IoSettings = DEFAULT_IO,
        *,
        checksums: bool = True,
        max_open: int = _MAX_OPEN,
    ) -> Self:
        """Opens the engines and starts the threads, whose names begin with `name`.

        The caller keeps `space` and `arena` open until `close` has returned, and has called `resume_from` of the
        store. `token` is the caller's: it ends the waits of requests, but no transfers. `checksums=False` is for
        measuring their cost.
        """
        engines: list[TransferEngine] = []
        try:
            for _ in range(io.num_threads):
                engines.append(open_engine(space.volume.device, io))
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        scheduler = cls(name, space, arena, token, io, engines, checksums=checksums, max_open=max_open)
        scheduler._threads.start((scheduler._run_commits, *[scheduler._run_transfers] * len(engines)))
        return scheduler

    @property
    def bytes_read(self) -> int:
        """Bytes read from the SSD since the start."""
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written to the SSD since the start."""
        return self._bytes_written

    def read(self, key: ChunkKey, step: Step, parts: Sequence[tuple[StateKind, Span]], terms: IoTerms) -> None:
        """Requests the read of states of a chunk, as `step` left them, into spans of the arena.

        Spans are aligned to 4096 bytes. The call blocks while too many transfers are open; then it raises the errors of
        `CancelToken.wait_for`.

        Raises:
            RuntimeError: the scheduler was closed.
        """
        self._add(ChunkJob(is_read=True, terms=terms, key=key, step=step, parts=parts))

    def write(self, key: ChunkKey, step: Step, parts: Sequence[tuple[StateKind, Span]], terms: IoTerms) -> None:
        """Requests the write of states of a chunk as those of `step`, as `read` does. A commit makes them valid.

        It waits until the commit before is decided. The request may come before the decision, because another actor
        sends it.
        """
        self._add(ChunkJob(is_read=False, terms=terms, key=key, step=step, parts=parts))

    def read_scratch(self, slots: Sequence[int], span: Span, terms: IoTerms) -> None:
        """Requests the read of scratch slots into a span of the size of their write, as `read` does."""
        self._add(ScratchJob(is_read=True, terms=terms, slots=slots, span=span))

    def write_scratch(self, slots: Sequence[int], span: Span, terms: IoTerms) -> None:
        """Requests the write of a span to scratch slots in order, as `read` does. The last may be filled in part.

        Commits do not wait for it.
        """
        self._add(ScratchJob(is_read=False, terms=terms, slots=slots, span=span))

    def commit(self, request: CommitRequest) -> None:
        """Requests a commit. It waits for the writes of its step and of earlier ones, and fails if one has failed.

        Writes and commits of later steps then wait for `decide`.

        Raises:
            RuntimeError: the scheduler was closed.
        """
        with self._changed:
            self._require_open()
            self._gate.add(request)
            self._changed.notify_all()

    def decide(self, step: Step) -> None:
        """Records that all SSDs of the job have committed a step, and releases the writes and the commit of the next.

        Raises:
            StepNotAllowed: this SSD has not committed it.
        """
        self._space.store.decide(step)
        with self._changed:
            self._gate.decide(step)
            if self._gate.undecided_step is None:
                held, self._held = self._held, []
                for job in held:
                    self._queue.push(job.rank, job)
                self._changed.notify_all()

    def describe_open(self) -> str:
        """Describes the transfers that are not done, by the one that was requested first; "" if there are none."""
        with self._changed:
            oldest = min(self._open, key=lambda job: job.since_s, default=None)
            num_open = len(self._open)
            undecided = self._gate.undecided_step if oldest in self._held else None
        if oldest is None:
            return ""
        if undecided is not None:
            return f"{self._space.store.name}: {oldest} waits until all SSDs of the job have committed step {undecided}"
        return (
            f"{self._space.store.name}: {oldest} is not done after {time.monotonic() - oldest.since_s:.1f} s, as the "
            f"first of {num_open} transfers: check the disk"
        )

    def close(self, deadline_s: float = _CLOSE_DEADLINE_S) -> None:
        """Finishes all requests and ends the threads. Those that wait for a decision fail.

        Raises:
            TimeoutError: a thread hangs in I/O. The caller must keep the space and the arena open, because the thread
                may still use them. `close` may be called again.
        """
        with self._changed:
            self._closing = True
            held, self._held = self._held, []
            self._changed.notify_all()
        for job in held:
            self._fail(job, RuntimeError(f"{self._space.store.name}: closed before {job} was allowed"))
            self._finish(job)
        try:
            self._threads.join(deadline_s)
        except TimeoutError as error:
            error.add_note(f"the SSD at {self._space.volume.path} did not finish: check the disk")
            raise

    # --- inside: the queue --------------------------------------------------------------------------------------------

    def _add(self, job: TransferJob) -> None:
        with self._changed:
            if not self._has_room():
                what = f"the SSD at {self._space.volume.path}, which has {len(self._open)} transfers to do"
                self._token.wait_for(self._changed, self._has_room, what)
            self._require_open()
            job.rank = (
                *job.terms.priority,
                self._num_arrived,
            )  # all different, so that a planned job returns to its place
            job.since_s = time.monotonic()
            self._num_arrived += 1
            self._open.add(job)
            step = job.committed_in
            if step is not None and self._gate.waits_for_decision(step):
                self._held.append(job)
            else:
                self._queue.push(job.rank, job)
            if step is not None:
                self._gate.begin_write(step)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        # A callback may make a request. The scheduler's own threads must not wait for themselves.
        return self._closing or len(self._open) < self._max_open or self._threads.include_caller

    def _require_open(self) -> None:
        if self._closing:
            raise RuntimeError(f"{self._space.store.name}: its I/O scheduler was closed and takes no requests")

    # --- inside: transfers --------------------------------------------------------------------------------------------

    def _run_transfers(self) -> None:
        engine = self._idle_engines.pop()
        try:
            while True:
                work = self._take(engine)
                if isinstance(work, TransferJob):
                    self._plan(work)
                elif work is not None:
                    self._submit(engine, work)
                elif engine.num_in_flight:
                    transfers = engine.wait(None)
                    end_s = time.monotonic()  # before the checksums
                    for transfer in transfers:
                        self._complete(transfer, end_s)
                else:
                    return
        except BaseException:
            with self._changed:
                self._is_broken = True
                self._changed.notify_all()
            raise
        finally:
            engine.close()

    def _take(self, engine: TransferEngine) -> Piece | TransferJob | None:
        """Returns the most urgent work. None: the caller must wait for its engine or, if that is idle, end."""
        with self._changed:
            while not self._queue:
                if self._closing or engine.num_in_flight:
                    return None
                self._changed.wait()
            job = self._queue.first
            if job.pieces is None:
                return self._queue.pop()
            if engine.num_in_flight == engine.depth:
                return None
            piece = job.pieces.popleft()
            if not job.pieces:
                self._queue.pop()
            return piece

    def _plan(self, job: TransferJob) -> None:
        """Checks a job against the store and cuts it into pieces.

        It runs without the lock, because the store reads its fence from the SSD.
        """
        works_at(job)
        pieces: deque[Piece] = deque()
        try:
            places = job.places(self._space)
            for _, span in places:
                self._arena.buffer(span)  # raises if there is no such span
            pieces = cut(job, places, self._io.piece_nbytes)
        except Exception as error:  # noqa: BLE001  the caller must learn of every error
            self._fail(job, error)
        if not pieces:
            self._finish(job)
            return
        with self._changed:
            job.pieces = pieces
            job.num_unfinished = len(pieces)
            self._queue.push(job.rank, job)
            self._changed.notify(len(pieces) - 1)

    def _submit(self, engine: TransferEngine, piece: Piece) -> None:
        works_at(piece.job)
        if piece.job.failed:
            self._settle(piece)
            return
        if not piece.job.is_read and self._checksums:
            for segment in piece.segments:
                segment.region.note_written(segment.start, self._arena.buffer(segment.span))
        first = piece.segments[0]
        buffer = self._arena.buffer(Span(first.span.offset, piece.nbytes))
        with self._changed:
            if piece.job.start_s is None:
                piece.job.start_s = time.monotonic()
        engine.submit(Transfer(is_read=piece.job.is_read, offset=first.offset, buffer=buffer, tag=piece))

    def _complete(self, transfer: Transfer, end_s: float) -> None:
        piece = transfer.tag
        assert isinstance(piece, Piece)
        job = piece.job
        works_at(job)
        try:
            if transfer.error is not None:
                raise piece.segments[0].region.io_error(job.verb, transfer.error) from transfer.error
            if job.is_read and self._checksums and not job.failed:
                for segment in piece.segments:
                    segment.region.verify(segment.start, self._arena.buffer(segment.span))
        except Exception as error:  # noqa: BLE001  the caller must learn of every error
            self._fail(job, error)
        else:
            with self._changed:
                job.end_s = max(job.end_s, end_s)
                job.moved_nbytes += piece.nbytes
                if job.is_read:
                    self._bytes_read += piece.nbytes
                else:
                    self._bytes_written += piece.nbytes
        self._settle(piece)

    def _settle(self, piece: Piece) -> None:
        with self._changed:
            piece.job.num_unfinished -= 1
            is_last = piece.job.num_unfinished == 0
        if is_last:
            self._finish(piece.job)

    def _finish(self, job: TransferJob) -> None:
        """Reports a job that moves no more bytes, unless it has failed. Commits may run only after the report."""
        with self._changed:
            self._open.discard(job)
            self._changed.notify_all()
        if not job.failed:
            start_s = job.end_s if job.start_s is None else job.start_s
            job.terms.on_done(IoResult(start_s=start_s, end_s=job.end_s, nbytes=job.moved_nbytes))
        if (step := job.committed_in) is not None:
            with self._changed:
                self._gate.end_write(step)
                self._changed.notify_all()

    def _fail(self, job: TransferJob, error: Exception) -> None:
        with self._changed:
            if job.failed or job not in self._open:
                return  # another piece has reported the failure, or all bytes have just moved
            self._mark_failed(job)
        job.on_failed(error)

    def _mark_failed(self, job: TransferJob) -> None:
        job.failed = True
        if (step := job.committed_in) is not None:
            self._gate.fail_write(step)

    def _end_broken(self, error: Exception, at: TransferJob | CommitRequest | None) -> None:
        """Reports an unexpected error that ends a thread, as the failure of its last work.

        A thread without work has done nothing that could fail. Later requests that need it are never done.
        """
        with self._changed:
            if self._closing:
                return
            if isinstance(at, TransferJob):
                self._mark_failed(at)
        if at is not None:
            at.on_failed(error)

    # --- inside: commits ----------------------------------------------------------------------------------------------

    def _run_commits(self) -> None:
        """Commits, in a thread of its own, because a sync can take long."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._gate.num_ready or self._has_ended())
                commit = self._gate.take()
                left = [] if commit is not None else self._gate.drain()
            if commit is None:
                break
            self._commit(commit)
        for request in left:
            request.on_failed(RuntimeError(f"{self._space.store.name}: closed before {request} was allowed"))

    def _has_ended(self) -> bool:
        is_idle = not self._open and not self._gate.num_waiting
        return self._closing and (is_idle or self._is_broken)

    def _commit(self, request: CommitRequest) -> None:
        works_at(request)
        store, step = self._space.store, request.step
        start_s = time.monotonic()
        try:
            if (failed := self._gate.failed_step) is not None and failed <= step:
                raise StoreError(f"{store.name}: a write of step {failed} failed; step {step} cannot be committed")
            store.commit(step, request.attempt, request.trainer_state, states_step=request.states_step)
        except Exception as error:  # noqa: BLE001  the caller must learn of every error
            request.on_failed(error)
            return
        with self._changed:
            self._gate.commit_ended(step)  # before the report, which may lead to the next step's writes
        request.on_done(IoResult(start_s=start_s, end_s=time.monotonic()))
