"""The SSD server: the actor that receives the requests to one SSD, and reports their end.

Its I/O scheduler does the work. It imports neither torch nor Ray.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from windlass.actors.job import SCHEDULER
from windlass.actors.lifecycle import ActorThreads
from windlass.actors.messages import (
    ActivationIoDone,
    ActorFailed,
    ChunkIo,
    ChunkIoDone,
    CommitStore,
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
)
from windlass.actors.timeline import NO_BLOCK, WHOLE_BLOCK, SpanRecorder, transfer_kind
from windlass.storage.ids import ActorName, Span, StateKind
from windlass.storage.integrity import StoreError
from windlass.storage.io import DEFAULT_IO, IoSettings
from windlass.storage.io_scheduler import CommitRequest, IoResult, IoScheduler, IoTerms
from windlass.storage.memory import Arena
from windlass.storage.store import CommitRecord, JobSpace, StoreGeometry

_STOP_DEADLINE_S = 60.0  # seconds that `stop` waits for the threads
_REPORT_S = 1.0  # seconds between two reports of spans; commits report them too, but may be rare


class SsdServer:
    """Serves one SSD to the other actors of a job.

    A slot named in a request belongs to the server until it reports the chunk as done. It never does so for a chunk
    that failed or timed out.
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
    ) -> None:
        """`path` is an SSD directory or a raw device. `send` is called from the server's threads.

        `direct=False` is for file systems without O_DIRECT. `checksums=False` is for measuring their cost. The scratch
        slots are for activations.
        """
        self.name = name
        self._path = path
        self._geometry = geometry
        self._arena_path = arena_path
        self._send = send
        self._settings = io
        self._direct = direct
        self._checksums = checksums
        self._scratch_slot_nbytes = scratch_slot_nbytes
        self._num_scratch_slots = num_scratch_slots
        self._io: IoScheduler | None = None  # from `resume_from` on
        self._stopping = threading.Event()
        self._threads = ActorThreads(name, geometry.job, send, self._stopping.is_set)
        self._spans = SpanRecorder(name, geometry.job, send)
        self._has_told_space = False

    @property
    def bytes_read(self) -> int:
        """Bytes read from the SSD since the server started."""
        return 0 if self._io is None else self._io.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written to the SSD since the server started."""
        return 0 if self._io is None else self._io.bytes_written

    # --- life cycle ---------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Maps the arena, creates or opens the store, and reserves its scratch space for this attempt.

        `resume_from` must follow.

        Raises:
            StoreError: the store on the SSD was made for another geometry, damaged, or taken by a newer attempt.
            InsufficientSpaceError: the SSD is too full for the model states, or for the scratch.
        """
        self._space = JobSpace.open(
            self._path,
            self._geometry,
            direct=self._direct,
            scratch_slot_nbytes=self._scratch_slot_nbytes,
            num_scratch_slots=self._num_scratch_slots,
        )
        try:
            self._arena = Arena.open(self._arena_path)
        except BaseException:
            self._space.close()
            raise

    def commits(self) -> list[CommitRecord]:
        """Returns the commit records of this SSD, oldest first."""
        return self._space.store.commits()

    def resume_from(self, commit: CommitRecord | None) -> None:
        """Resumes from a commit that every SSD of the job has, or from the beginning if None; starts the threads.

        Raises:
            StoreCorrupt: this SSD lacks that commit, or it is damaged.
        """
        self._space.store.resume_from(commit)
        self._io = IoScheduler.start(self.name, self._space, self._arena, self._settings, checksums=self._checksums)
        self._threads.start((self._run_reports,))

    def stop(self, *, delete_store: bool = False, deadline_s: float = _STOP_DEADLINE_S) -> None:
        """Finishes all queued commands, ends the threads, and closes the store and the arena.

        Raises:
            TimeoutError: a thread hangs in I/O. The files stay open, because it may still write.
        """
        self._stopping.set()
        if self._io is not None:
            self._io.close(deadline_s)
        self._threads.join(deadline_s)
        self._spans.tell(0)
        self._space.close(delete=delete_store)
        self._arena.close()

    # --- messages -----------------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Queues a command. It returns at once, but blocks while too many transfers are open.

        Answers and failures are sent through `send`.

        Raises:
            ValueError: the message is of another job or kind.
            IoQueueFullError: too many transfers stayed open.
            RuntimeError: the server is stopped.
        """
        name = f"{self.name} of job {self._geometry.job}"
        if message.job != self._geometry.job or not isinstance(message, SsdRequest | CommitStore):
            raise ValueError(f"{name} does not accept {type(message).__name__} of job {message.job}")
        if self._stopping.is_set():
            raise RuntimeError(f"{name} is stopped and takes no messages")
        assert self._io is not None, "`resume_from` comes first"
        match message:
            case ReadChunks():
                for item in message.items:
                    self._io.read(item.key, message.step, _parts(item), self._chunk_terms(message, item))
            case WriteChunks():
                for item in message.items:
                    self._io.write(item.key, message.step, _parts(item), self._chunk_terms(message, item))
            case ReadActivations():
                self._io.read_scratch(message.slots, message.span, self._activation_terms(message))
            case WriteActivations():
                self._io.write_scratch(message.slots, message.span, self._activation_terms(message))
            case CommitStore():
                self._io.commit(self._commit_request(message))

    def _chunk_terms(self, request: ReadChunks | WriteChunks, item: ChunkIo) -> IoTerms:
        def report(result: IoResult) -> None:
            kind = transfer_kind(
                is_read=isinstance(request, ReadChunks),
                states=[part.kind for part in item.parts],
                param_kind=self._geometry.formats.param_kind,
            )
            self._note(kind, request.step, item.key.block, item.key.chunk, result)
            done = ChunkIoDone(job=request.job, step=request.step, correlation=request.correlation, key=item.key)
            self._send(request.reply_to, done)

        return self._terms(request, report)

    def _activation_terms(self, request: ReadActivations | WriteActivations) -> IoTerms:
        def report(result: IoResult) -> None:
            is_read = isinstance(request, ReadActivations)
            kind = SpanKind.READ_ACTIVATIONS if is_read else SpanKind.WRITE_ACTIVATIONS
            self._note(kind, request.step, request.block, WHOLE_BLOCK, result)
            done = ActivationIoDone(job=request.job, step=request.step, correlation=request.correlation)
            self._send(request.reply_to, done)

        return self._terms(request, report)

    def _terms(self, request: SsdRequest, report: Callable[[IoResult], None]) -> IoTerms:
        return IoTerms(
            priority=request.priority,
            deadline_s=request.deadline_s,
            on_done=report,
            on_failed=lambda error: self._report_failure(request, error),
        )

    def _commit_request(self, command: CommitStore) -> CommitRequest:
        return CommitRequest(
            step=command.step,
            attempt=command.attempt,
            trainer_state=command.trainer_state,
            states_step=command.states_step,
            on_done=lambda result: self._report_commit(command, result),
            on_failed=lambda error: self._report_failure(command, error),
        )

    # --- reports ------------------------------------------------------------------------------------------------------

    def _note(self, kind: SpanKind, step: int, block: int, chunk: int, result: IoResult) -> None:
        """Records the time span of transfers, if there was anything to transfer."""
        if result.nbytes:
            self._spans.note(self.name, kind, step, block, chunk, result.start_s, result.end_s, result.nbytes)

    def _report_commit(self, command: CommitStore, result: IoResult) -> None:
        assert self._io is not None
        self._spans.note(self.name, SpanKind.COMMIT, command.step, NO_BLOCK, WHOLE_BLOCK, result.start_s, result.end_s)
        self._spans.tell(command.step)  # before StoreCommitted, so that the step's timeline includes them
        self._tell_space(command)
        committed = StoreCommitted(
            job=command.job,
            step=command.step,
            actor=self.name,
            bytes_read=self._io.bytes_read,
            bytes_written=self._io.bytes_written,
        )
        self._send(SCHEDULER, committed)

    def _report_failure(self, about: Message, error: Exception) -> None:
        self._send(SCHEDULER, ActorFailed.of(error, actor=self.name, about=about))

    def _tell_space(self, command: CommitStore) -> None:
        """Reports the used SSD space once, because an attempt reserves all its space before it serves."""
        if self._has_told_space:
            return
        self._has_told_space = True
        try:
            nbytes = self._space.held_nbytes()
        except StoreError:
            return  # no reason to fail the job; errors that matter are reported elsewhere
        measured = MemoryReported(
            job=command.job, step=command.step, actor=self.name, kind=MemoryKind.SSD, nbytes=nbytes
        )
        self._send(SCHEDULER, measured)

    def _run_reports(self) -> None:
        while not self._stopping.wait(_REPORT_S):
            self._spans.tell(0)


def _parts(item: ChunkIo) -> list[tuple[StateKind, Span]]:
    return [(part.kind, part.span) for part in item.parts]
