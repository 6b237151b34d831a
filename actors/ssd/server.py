"""The SSD server: the actor that receives the requests to one SSD, and reports their end.

Its I/O scheduler does the work. It imports neither torch nor Ray.
"""

from collections.abc import Callable
from pathlib import Path

from windlass.actors.job import SCHEDULER
from windlass.actors.lifecycle import ActorThreads
from windlass.actors.messages import (
    ActivationIoDone,
    ActorFailed,
    ChunkIo,
    ChunkIoDone,
    CommitDecided,
    CommitStore,
    DescribeStatus,
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
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName, Span, StateKind
from windlass.storage.integrity import StoreError
from windlass.storage.io import DEFAULT_IO, IoSettings
from windlass.storage.io_scheduler import CommitRequest, IoResult, IoScheduler, IoTerms
from windlass.storage.memory import Arena
from windlass.storage.store import CommitRecord, JobSpace

_STOP_DEADLINE_S = 60.0  # seconds that `stop` waits for the threads
_Accepted = SsdRequest | CommitStore | CommitDecided | DescribeStatus
_REPORT_S = 1.0  # seconds between two reports of spans; commits report them too, but may be rare


class SsdServer:
    """Serves one SSD to the other actors of a job, from a commit on.

    A slot named in a request belongs to the server until it reports the chunk as done. It never does so for a chunk
    that failed.
    """

    def __init__(
        self,
        name: ActorName,
        space: JobSpace,
        commit: CommitRecord | None,
        arena_path: Path | str,
        send: Callable[[ActorName, Message], None],
        *,
        io: IoSettings = DEFAULT_IO,
        checksums: bool = True,
        deadline_s: float = _STOP_DEADLINE_S,
    ) -> None:
        """Resumes from a commit, maps the arena, and starts the threads. The server closes `space`, also on an error.

        Args:
            name: of the server.
            space: of the job on the SSD.
            commit: a commit that every SSD of the job has; None: the job begins.
            arena_path: the job's arena.
            send: is called from the server's threads.
            io: settings of the SSD.
            checksums: False is for measuring their cost.
            deadline_s: timeout of `stop`.

        Raises:
            StoreCorrupt: this SSD lacks that commit, or it is damaged.
        """
        self.name = name
        self._space = space
        self._geometry = space.store.geometry
        self._send = send
        self._deadline_s = deadline_s
        self._deletes_store = False
        self._has_told_space = False
        self._token = CancelToken()
        self._threads = ActorThreads(name, self._geometry.job, self._token, send, deadline_s=deadline_s)
        self._spans = SpanRecorder(name, self._geometry.job, send)
        with self._threads.stopped_on_error():
            self._threads.resources.callback(self._close_space)
            space.store.resume_from(commit)
            arena = Arena.open(arena_path)
            self._threads.resources.callback(arena.close)
            self._io = IoScheduler.start(name, space, arena, self._token, io, checksums=checksums)
            self._threads.resources.callback(self._spans.tell, 0)  # the last spans
            self._threads.start((self._run_reports,))

    @property
    def bytes_read(self) -> int:
        """Bytes read from the SSD since the server started."""
        return self._io.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written to the SSD since the server started."""
        return self._io.bytes_written

    # --- life cycle ---------------------------------------------------------------------------------------------------

    def stop(self, *, delete_store: bool = False) -> None:
        """Finishes all queued commands, ends the threads, and closes the store and the arena.

        Raises:
            TimeoutError: a thread hangs in I/O. The files stay open, because it may still write.
        """
        self._deletes_store = delete_store
        self._token.cancel()  # first, so that no more messages are taken
        self._io.close(self._deadline_s)
        self._threads.stop()

    def _close_space(self) -> None:
        self._space.close(delete=self._deletes_store)

    # --- messages -----------------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Queues a command. It returns at once, but blocks while too many transfers are open.

        Answers and failures are sent through `send`.

        Raises:
            ValueError: the message is of another job or kind.
            RuntimeError: the server is stopped.
        """
        name = f"{self.name} of job {self._geometry.job}"
        if message.job != self._geometry.job or not isinstance(message, _Accepted):
            raise ValueError(f"{name} does not accept {type(message).__name__} of job {message.job}")
        if self._token.is_cancelled:
            raise RuntimeError(f"{name} is stopped and takes no messages")
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
            case CommitDecided():
                self._io.decide(message.step)
            case DescribeStatus():
                self._threads.report_status(self._io.describe_open())

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
        while not self._token.pause(_REPORT_S):
            self._spans.tell(0)


def _parts(item: ChunkIo) -> list[tuple[StateKind, Span]]:
    return [(part.kind, part.span) for part in item.parts]
