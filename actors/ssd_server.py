"""One SSD of one job: moves chunks between its store and the arena, most urgent first.

The threads spend their time in system calls that release the GIL; no torch and no Ray here.
"""

import heapq
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from windlass.actors.context import SCHEDULER
from windlass.actors.messages import (
    ActorFailed,
    ChunkIo,
    ChunkIoDone,
    CommitStore,
    Message,
    ReadChunks,
    StoreCommitted,
    WriteChunks,
)
from windlass.storage.arena import ALIGNMENT_NBYTES, Arena
from windlass.storage.ids import ActorName, Step
from windlass.storage.store_format import CommitRecord, StoreError, StoreGeometry
from windlass.storage.tensor_store import Region, TensorStore, store_path

_STOP_DEADLINE_S = 60.0


@dataclass(slots=True, eq=False)
class _ChunkJob:
    """One chunk of a request on its way: first unplanned, then cut into pieces that the threads share."""

    request: ReadChunks | WriteChunks
    item: ChunkIo
    arrival: int
    pieces: deque["_Piece"] | None = None  # not yet taken by a thread; None: not planned
    num_unfinished: int = 0
    failed: bool = False
    entry: tuple[tuple[int, int], int, "_ChunkJob"] = field(init=False)

    def __post_init__(self) -> None:
        self.entry = (self.request.priority, self.arrival, self)  # arrivals differ, so jobs are never compared


@dataclass(slots=True, eq=False)
class _Piece:
    job: _ChunkJob
    region: Region
    start: int
    buffer: memoryview


class SsdServer:
    """Serves one SSD directory to the other actors of a job."""

    def __init__(
        self,
        name: ActorName,
        directory: Path | str,
        geometry: StoreGeometry,
        arena_path: Path | str,
        send: Callable[[ActorName, Message], None],
        *,
        num_threads: int = 4,
        piece_nbytes: int = 4 << 20,
        direct: bool = True,
    ) -> None:
        """`send` is called from the server's threads. `direct=False` is for file systems without O_DIRECT."""
        if num_threads < 1 or piece_nbytes <= 0 or piece_nbytes % ALIGNMENT_NBYTES:
            raise ValueError(
                f"an SSD server needs at least one thread, not {num_threads}, and a piece size that is a positive "
                f"multiple of {ALIGNMENT_NBYTES} bytes, not {piece_nbytes}"
            )
        self.name = name
        self._directory = Path(directory)
        self._geometry = geometry
        self._arena_path = Path(arena_path)
        self._send = send
        self._num_threads = num_threads
        self._piece_nbytes = piece_nbytes
        self._direct = direct
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._queue: list[tuple[tuple[int, int], int, _ChunkJob]] = []  # heap by (priority, arrival)
        self._commits: deque[CommitStore] = deque()  # may run now
        self._commits_waiting: dict[Step, CommitStore] = {}  # until the step's writes are done
        self._num_open_writes: Counter[Step] = Counter()
        self._failed_steps: set[Step] = set()  # a write of theirs failed: never to be committed
        self._num_arrived = 0
        self._stopping = False
        self._bytes_read = 0
        self._bytes_written = 0

    @property
    def bytes_read(self) -> int:
        """Bytes read from the SSD since the server started."""
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written to the SSD since the server started."""
        return self._bytes_written

    def setup(self) -> None:
        """Map the arena, create the store or open the one that is there, and start the threads.

        Raises:
            StoreError: the store on the disk was made for another geometry, damaged, or taken by a newer attempt.
            NotEnoughRoom: the disk is too small for the model states.
        """
        self._arena = Arena.open(self._arena_path)
        try:
            self._store = self._create_or_open()
        except BaseException:
            self._arena.close()
            raise
        for i in range(self._num_threads):
            thread = threading.Thread(target=self._run, name=f"{self.name}-{i}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def last_commit(self) -> CommitRecord | None:
        """The states that a restart finds on this SSD; None before the first commit."""
        return self._store.last_commit()

    def roll_back(self, step: Step) -> None:
        """Go back to `step`, the last that every SSD of the job has committed. Before any other message."""
        self._store.roll_back(step)

    def post(self, message: Message) -> None:
        """Take a command; returns at once. Answers and failures go out through `send`."""
        if message.job != self._geometry.job or not isinstance(message, ReadChunks | WriteChunks | CommitStore):
            error = (
                f"{self.name} of job {self._geometry.job} has no use for {type(message).__name__} of job {message.job}"
            )
            self._send(SCHEDULER, self._failure(message, error, detail=""))
            return
        with self._changed:
            if self._stopping:
                raise RuntimeError(f"{self.name} of job {self._geometry.job} is stopped and takes no messages")
            if isinstance(message, CommitStore):
                if self._num_open_writes[message.step]:
                    self._commits_waiting[message.step] = message
                else:
                    self._commits.append(message)
            else:
                self._enqueue(message)
            self._changed.notify_all()

    def stop(self, *, delete_store: bool = False) -> None:
        """Finish what was posted, end the threads, close the store and the arena.

        Raises:
            TimeoutError: a thread hangs in the SSD; the files stay open, as it may still write.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        until_s = time.monotonic() + _STOP_DEADLINE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(
                    f"{self.name} of job {self._geometry.job}: the SSD at {self._directory} did not finish within "
                    f"{_STOP_DEADLINE_S} s; check the disk"
                )
        self._threads.clear()
        if delete_store:
            self._store.delete()
        else:
            self._store.close()
        self._arena.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _create_or_open(self) -> TensorStore:
        wanted = self._geometry
        if not store_path(self._directory, wanted.job).exists():
            return TensorStore.create(self._directory, wanted, direct=self._direct)
        store = TensorStore.open(self._directory, wanted.job, wanted.attempt, direct=self._direct)
        found = store.geometry
        if replace(found, attempt=wanted.attempt) != wanted:
            store.close()
            raise StoreError(f"{store.path} was made for {found}, not for {wanted}; delete it if the job starts over")
        return store

    def _enqueue(self, request: ReadChunks | WriteChunks) -> None:
        for item in request.items:
            job = _ChunkJob(request, item, self._num_arrived)
            self._num_arrived += 1
            heapq.heappush(self._queue, job.entry)
        if isinstance(request, WriteChunks):
            self._num_open_writes[request.step] += len(request.items)

    def _run(self) -> None:
        while True:
            match self._take():
                case None:
                    return
                case _Piece() as piece:
                    self._move(piece)
                case _ChunkJob() as job:
                    self._plan(job)
                case CommitStore() as command:
                    self._commit(command)

    def _take(self) -> _Piece | _ChunkJob | CommitStore | None:
        """The most urgent thing to do; None when the server is stopped and everything is done."""
        with self._changed:
            while not self._commits and not self._queue:
                if self._stopping:
                    return None
                self._changed.wait()
            if self._commits:
                return self._commits.popleft()
            _, _, job = self._queue[0]
            if job.pieces is None:
                heapq.heappop(self._queue)
                return job
            piece = job.pieces.popleft()
            if not job.pieces:
                heapq.heappop(self._queue)
            return piece

    def _plan(self, job: _ChunkJob) -> None:
        """Check a chunk against the store and cut it; outside the lock, as the store reads its fence."""
        pieces: deque[_Piece] = deque()
        try:
            for part in job.item.parts:
                locate = (
                    self._store.region_to_read if isinstance(job.request, ReadChunks) else self._store.region_to_write
                )
                region = locate(job.item.key, part.kind, job.request.step, part.span.nbytes)
                buffer = self._arena.buffer(part.span)
                for start in range(0, part.span.nbytes, self._piece_nbytes):
                    pieces.append(_Piece(job, region, start, buffer[start : start + self._piece_nbytes]))
        except Exception as error:  # noqa: BLE001  whatever it is, the scheduler must hear of it
            self._fail(job, error)
            pieces.clear()
        if not pieces:
            self._finish(job)
            return
        with self._changed:
            job.pieces = pieces
            job.num_unfinished = len(pieces)
            heapq.heappush(self._queue, job.entry)
            self._changed.notify(len(pieces) - 1)

    def _move(self, piece: _Piece) -> None:
        job = piece.job
        is_read = isinstance(job.request, ReadChunks)
        nbytes = 0
        if not job.failed:
            try:
                transfer = self._store.read_piece if is_read else self._store.write_piece
                transfer(piece.region, piece.start, piece.buffer)
                nbytes = piece.buffer.nbytes
            except Exception as error:  # noqa: BLE001  whatever it is, the scheduler must hear of it
                self._fail(job, error)
        with self._changed:
            if is_read:
                self._bytes_read += nbytes
            else:
                self._bytes_written += nbytes
            job.num_unfinished -= 1
            is_last = job.num_unfinished == 0
        if is_last:
            self._finish(job)

    def _finish(self, job: _ChunkJob) -> None:
        request, step = job.request, job.request.step
        if not job.failed:
            done = ChunkIoDone(job=request.job, step=step, correlation=request.correlation, key=job.item.key)
            self._send(request.reply_to, done)
        if isinstance(request, WriteChunks):
            with self._changed:
                self._num_open_writes[step] -= 1
                if self._num_open_writes[step] == 0:
                    del self._num_open_writes[step]
                    if step in self._commits_waiting:
                        self._commits.append(self._commits_waiting.pop(step))
                        self._changed.notify()

    def _fail(self, job: _ChunkJob, error: Exception) -> None:
        with self._changed:
            if job.failed:
                return  # another piece has told
            job.failed = True
            if isinstance(job.request, WriteChunks):
                self._failed_steps.add(job.request.step)
        self._send(SCHEDULER, self._failure(job.request, str(error), traceback.format_exc()))

    def _commit(self, command: CommitStore) -> None:
        try:
            if command.step in self._failed_steps:
                raise StoreError(f"a write of step {command.step} failed, so it cannot be committed")
            self._store.commit(command.step, command.attempt, command.trainer_state)
        except Exception as error:  # noqa: BLE001  whatever it is, the scheduler must hear of it
            self._send(SCHEDULER, self._failure(command, str(error), traceback.format_exc()))
            return
        committed = StoreCommitted(
            job=command.job,
            step=command.step,
            actor=self.name,
            bytes_read=self._bytes_read,
            bytes_written=self._bytes_written,
        )
        self._send(SCHEDULER, committed)

    def _failure(self, message: Message, error: str, detail: str) -> ActorFailed:
        return ActorFailed(job=message.job, step=message.step, actor=self.name, error=error, detail=detail)
