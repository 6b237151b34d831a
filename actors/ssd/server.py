"""The SSD server: transfers chunks and activations of one job between one SSD and the arena, in order of priority.

Its threads spend most time in system calls that release the GIL, and a little in checksums. It imports neither torch
nor Ray.
"""

import heapq
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from windlass.actors.job import SCHEDULER
from windlass.actors.lifecycle import ActorThreads, works_at
from windlass.actors.messages import (
    ActorFailed,
    CommitStore,
    FailureKind,
    MemoryKind,
    MemoryReported,
    Message,
    ReadActivations,
    ReadChunks,
    SpanKind,
    SsdRequest,
    StoreCommitted,
    WriteActivations,
    WriteChunks,
    in_words,
)
from windlass.actors.ssd.transfer_jobs import ActivationsJob, ChunkJob, Piece, TransferJob, cut
from windlass.actors.timeline import NO_BLOCK, WHOLE_BLOCK, SpanRecorder
from windlass.storage.ids import ActorName, Span, Step
from windlass.storage.integrity import StoreError, StoreMissing
from windlass.storage.io import DEFAULT_IO, IoSettings, Transfer, TransferEngine, open_engine
from windlass.storage.memory import Arena
from windlass.storage.ssd import Volume
from windlass.storage.store import CommitRecord, StoreGeometry, TensorStore

_STOP_DEADLINE_S = 60.0  # seconds that `stop` waits for the threads
# Seconds between two checks for overdue requests.
_TICK_S = 1.0
# Limit of chunks and activation requests that are queued or in flight. The callers' slots limit them as well; this
# limit stops callers with a defect.
_MAX_OPEN_CHUNKS = 4096


class SsdServer:
    """Serves one SSD to the other actors of a job.

    A slot named in a request belongs to the server until it reports the chunk as done. It never does so for a chunk
    that failed or timed out. Therefore late bytes cannot arrive in memory that has a new owner.
    """

    def __init__(
        self,
        name: ActorName,
        path: Path | str,
        geometry: StoreGeometry,
        arena_path: Path | str,
        send: Callable[[ActorName, Message], None],
        *,
        io: IoSettings = DEFAULT_IO,
        direct: bool = True,
        checksums: bool = True,
        scratch_slot_nbytes: int = 1 << 20,
        num_scratch_slots: int = 0,
        max_open_chunks: int = _MAX_OPEN_CHUNKS,
    ) -> None:
        """`path` is an SSD directory or a raw device. `send` is called from the server's threads.

        `direct=False` is for file systems without O_DIRECT. `checksums=False` is for measuring their cost. The scratch
        slots are for activations.
        """
        self.name = name
        self._path = Path(path)
        self._geometry = geometry
        self._arena_path = Path(arena_path)
        self._send = send
        self._io = io
        self._direct = direct
        self._checksums = checksums
        self._scratch_slot_nbytes = scratch_slot_nbytes
        self._num_scratch_slots = num_scratch_slots
        self._max_open_chunks = max_open_chunks
        self._threads = ActorThreads(name, geometry.job, send, lambda: self._stopping)
        self._idle_engines: list[TransferEngine] = []  # one for each transfer thread, until that starts
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._queue: list[tuple[tuple[int, int], int, TransferJob]] = []  # heap by (priority, arrival)
        self._open: set[TransferJob] = set()  # queued or in flight
        self._commits: deque[CommitStore] = deque()  # can run now
        self._commits_waiting: list[CommitStore] = []  # until the writes of their step and of earlier ones are done
        self._num_open_writes: Counter[Step] = Counter()
        self._failed_step: Step | None = None  # first step with a failed write; it and later ones cannot be committed
        self._num_arrived = 0
        self._stopping = False
        self._is_broken = False  # a thread has died, so its transfers will never be done
        self._spans = SpanRecorder(name, geometry.job, send)
        self._bytes_read = 0
        self._bytes_written = 0
        self._has_told_space = False

    @property
    def bytes_read(self) -> int:
        """Bytes read from the SSD since the server started."""
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written to the SSD since the server started."""
        return self._bytes_written

    def setup(self) -> None:
        """Maps the arena, creates or opens the store, and reserves its scratch space for this attempt.

        `resume_from` must follow.

        Raises:
            StoreError: the store on the SSD was made for another geometry, damaged, or taken by a newer attempt.
            InsufficientSpaceError: the SSD is too full for the model states, or for the scratch.
        """
        self._volume = Volume.open(self._path, direct=self._direct)
        try:
            self._store = self._create_or_open()
            self._scratch = self._store.reserve_scratch(self._scratch_slot_nbytes, self._num_scratch_slots)
            self._arena = Arena.open(self._arena_path)
        except BaseException:
            self._volume.close()
            raise

    def commits(self) -> list[CommitRecord]:
        """Returns the commit records of this SSD, oldest first."""
        return self._store.commits()

    def resume_from(self, commit: CommitRecord | None) -> None:
        """Resumes from a commit that every SSD of the job has, or from the beginning if None; starts the threads.

        Raises:
            StoreCorrupt: this SSD lacks that commit, or it is damaged.
        """
        self._store.resume_from(commit)
        engines = self._idle_engines
        try:
            for _ in range(self._io.num_threads):
                engines.append(open_engine(self._volume.device, self._io))
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        self._threads.start((self._run_control, *[self._run_transfers] * len(engines)))

    def post(self, message: Message) -> None:
        """Queues a command. It returns at once, but blocks while too many chunks are open.

        Answers and failures are sent through `send`.
        """
        if message.job != self._geometry.job or not isinstance(message, SsdRequest | CommitStore):
            text = (
                f"{self.name} of job {self._geometry.job} does not accept {type(message).__name__} of job {message.job}"
            )
            self._send(SCHEDULER, self._failure(message, ValueError(text), in_words(message)))
            return
        with self._changed:
            if self._stopping:
                raise RuntimeError(f"{self.name} of job {self._geometry.job} is stopped and takes no messages")
            if isinstance(message, CommitStore):
                self._commits_waiting.append(message)
                self._release_commits()
            elif not self._changed.wait_for(self._has_room, timeout=message.deadline_s):
                text = (
                    f"the SSD at {self._path} left {len(self._open)} chunks waiting for {message.deadline_s:g} s; "
                    "check the disk"
                )
                self._send(SCHEDULER, self._failure(message, TimeoutError(text), in_words(message)))
            else:
                self._enqueue(message)
            self._changed.notify_all()

    def stop(self, *, delete_store: bool = False, deadline_s: float = _STOP_DEADLINE_S) -> None:
        """Finishes all queued commands, ends the threads, and closes the store and the arena.

        Raises:
            TimeoutError: a thread hangs in I/O. The files stay open, because it may still write.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        try:
            self._threads.join(deadline_s)
        except TimeoutError as error:
            error.add_note(f"the SSD at {self._path} did not finish: check the disk")
            raise
        self._spans.tell(0)
        if delete_store:
            TensorStore.delete(self._volume, self._geometry.job)
        self._volume.close()
        self._arena.close()

    # --- inside: the queue --------------------------------------------------------------------------------------------

    def _create_or_open(self) -> TensorStore:
        wanted = self._geometry
        try:
            store = TensorStore.open(self._volume, wanted.job, wanted.attempt)
        except StoreMissing:
            return TensorStore.create(self._volume, wanted)
        found = store.geometry
        if replace(found, attempt=wanted.attempt) != wanted:
            names = ("ssd", "ssd_weights", "rank", "formats", "chunk_numel", "chunks_per_block")
            differences = "; ".join(
                f"{name} {getattr(found, name)}, now {getattr(wanted, name)}"
                for name in names
                if getattr(found, name) != getattr(wanted, name)
            )
            raise StoreError(
                f"{store.name}: the states were laid out for other settings ({differences}); a job's model and SSDs "
                "can't change while it lives: restore the settings, or submit the job again"
            )
        return store

    def _has_room(self) -> bool:
        # `send` may lead to a `post` in one of the server's own threads, which must not wait for itself.
        return len(self._open) < self._max_open_chunks or threading.current_thread() in self._threads

    def _enqueue(self, request: SsdRequest) -> None:
        late_at_s = time.monotonic() + request.deadline_s
        match request:
            case ReadChunks() | WriteChunks():
                for item in request.items:
                    self._add(ChunkJob(request, self._num_arrived, late_at_s, item))
            case ReadActivations() | WriteActivations():
                self._add(ActivationsJob(request, self._num_arrived, late_at_s))
        if isinstance(request, WriteChunks):
            self._num_open_writes[request.step] += len(request.items)

    def _add(self, job: TransferJob) -> None:
        self._num_arrived += 1
        self._open.add(job)
        heapq.heappush(self._queue, job.entry)

    def _release_commits(self) -> None:
        """Releases the commits that no longer have to wait for a write."""
        waiting = self._commits_waiting
        oldest = min(+self._num_open_writes, default=None)
        self._commits_waiting = [commit for commit in waiting if oldest is not None and oldest <= commit.step]
        self._commits += [commit for commit in waiting if commit not in self._commits_waiting]

    # --- inside: transfers --------------------------------------------------------------------------------------------

    def _run_transfers(self) -> None:
        engine = self._idle_engines.pop()
        try:
            while True:
                taken = self._take(engine)
                if isinstance(taken, TransferJob):
                    self._plan(taken)
                elif taken is not None:
                    self._submit(engine, taken)
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
            raise
        finally:
            engine.close()

    def _take(self, engine: TransferEngine) -> Piece | TransferJob | None:
        """Returns the most urgent work. None: the caller must wait for its engine or, if that is idle, end."""
        with self._changed:
            while not self._queue:
                if self._stopping or engine.num_in_flight:
                    return None
                self._changed.wait()
            _, _, job = self._queue[0]
            if job.pieces is None:
                heapq.heappop(self._queue)
                return job
            if engine.num_in_flight == engine.depth:
                return None
            piece = job.pieces.popleft()
            if not job.pieces:
                heapq.heappop(self._queue)
            return piece

    def _plan(self, job: TransferJob) -> None:
        """Checks a job against the store and cuts it into pieces.

        It runs without the lock, because the store reads its fence from the SSD.
        """
        works_at(job.request)
        pieces: deque[Piece] = deque()
        try:
            places = job.places(self._store, self._scratch)
            for _, span in places:
                self._arena.buffer(span)  # raises if there is no such span
            pieces = cut(job, places, self._io.piece_nbytes)
        except Exception as error:  # noqa: BLE001  the scheduler must learn of every error
            self._fail(job, error)
        if not pieces:
            self._finish(job)
            return
        with self._changed:
            job.pieces = pieces
            job.num_unfinished = len(pieces)
            heapq.heappush(self._queue, job.entry)
            self._changed.notify(len(pieces) - 1)

    def _submit(self, engine: TransferEngine, piece: Piece) -> None:
        works_at(piece.job.request)
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
        verb = "read" if transfer.is_read else "write"
        try:
            if transfer.error is not None:
                raise piece.segments[0].region.io_error(verb, transfer.error) from transfer.error
            if transfer.is_read and self._checksums and not piece.job.failed:
                for segment in piece.segments:
                    segment.region.verify(segment.start, self._arena.buffer(segment.span))
        except Exception as error:  # noqa: BLE001  the scheduler must learn of every error
            self._fail(piece.job, error)
        else:
            with self._changed:
                piece.job.end_s = max(piece.job.end_s, end_s)
                piece.job.moved_nbytes += piece.nbytes
                if transfer.is_read:
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
        request, step = job.request, job.request.step
        with self._changed:
            self._open.discard(job)
            self._changed.notify_all()
        if not job.failed:
            self._note(job)
            self._send(request.reply_to, job.done())
        if isinstance(request, WriteChunks):
            with self._changed:
                self._num_open_writes[step] -= 1
                if self._num_open_writes[step] == 0:
                    del self._num_open_writes[step]
                    self._release_commits()
                    self._changed.notify_all()

    def _note(self, job: TransferJob) -> None:
        """Records the time span of a job's transfers, without the time in the queue."""
        if job.start_s is None:
            return  # there was nothing to transfer
        kind, block, chunk = job.span(self._store)
        self._spans.note(self.name, kind, job.request.step, block, chunk, job.start_s, job.end_s, job.moved_nbytes)

    def _fail(self, job: TransferJob, error: Exception) -> None:
        with self._changed:
            if job.failed:
                return  # another piece has reported the failure
            job.failed = True
            if isinstance(job.request, WriteChunks):
                step = job.request.step
                self._failed_step = step if self._failed_step is None else min(step, self._failed_step)
        what = f"the {'read' if job.is_read else 'write'} of {job.name}"
        self._send(SCHEDULER, self._failure(job.request, error, what))

    # --- inside: commits and deadlines --------------------------------------------------------------------------------

    def _run_control(self) -> None:
        """Commits and checks timeouts.

        It has its own thread, because a sync can take long and transfers may hang.
        """
        while True:
            with self._changed:
                self._changed.wait_for(self._has_control_work, timeout=_TICK_S)
                command = self._commits.popleft() if self._commits else None
                is_idle = not self._open and not self._commits_waiting
                if command is None and self._stopping and (is_idle or self._is_broken):
                    return
                now_s = time.monotonic()
                late = [job for job in self._open if job.late_at_s < now_s]
            for job in late:
                self._fail(job, TimeoutError(self._lateness(job)))
            if command is not None:
                self._commit(command)
            elif not self._stopping:
                self._spans.tell(0)  # commits may be rare, so spans are also sent here

    def _has_control_work(self) -> bool:
        return bool(self._commits) or (self._stopping and not self._open)

    def _lateness(self, job: TransferJob) -> str:
        late = f"not done within {job.request.deadline_s:g} s"
        return f"{self._store.name}: {late}; the SSD is slow or hangs: check the disk"

    def _commit(self, command: CommitStore) -> None:
        works_at(command)
        try:
            if (failed := self._failed_step) is not None and failed <= command.step:
                raise StoreError(
                    f"{self._store.name}: a write of step {failed} failed; step {command.step} cannot be committed"
                )
            start_s = time.monotonic()
            self._store.commit(command.step, command.attempt, command.trainer_state, states_step=command.states_step)
            self._spans.note(self.name, SpanKind.COMMIT, command.step, NO_BLOCK, WHOLE_BLOCK, start_s, time.monotonic())
        except Exception as error:  # noqa: BLE001  the scheduler must learn of every error
            self._send(SCHEDULER, self._failure(command, error, f"the commit of step {command.step}"))
            return
        self._spans.tell(command.step)  # before StoreCommitted, so that the step's timeline includes them
        self._tell_space(command)
        committed = StoreCommitted(
            job=command.job,
            step=command.step,
            actor=self.name,
            bytes_read=self._bytes_read,
            bytes_written=self._bytes_written,
        )
        self._send(SCHEDULER, committed)

    def _tell_space(self, command: CommitStore) -> None:
        """Reports the used SSD space once, because an attempt reserves all its space before it serves."""
        if self._has_told_space:
            return
        self._has_told_space = True
        try:
            nbytes = self._volume.held_nbytes(command.job)
        except StoreError:
            return  # no reason to fail the job; errors that matter are reported elsewhere
        measured = MemoryReported(
            job=command.job, step=command.step, actor=self.name, kind=MemoryKind.SSD, nbytes=nbytes
        )
        self._send(SCHEDULER, measured)

    def _failure(self, message: Message, error: Exception, what: str) -> ActorFailed:
        kind = FailureKind.of(error)
        name = f"{type(error).__name__}: " if kind is FailureKind.UNFORESEEN else ""
        return ActorFailed(
            job=message.job,
            step=message.step,
            actor=self.name,
            kind=kind,
            error=f"{name}{error} (at {what})",
            detail="".join(traceback.format_exception(error)),
        )
