"""The message about a failure, and descriptions of messages in error texts."""

import errno
import re
import traceback
from dataclasses import dataclass
from enum import StrEnum

from windlass.actors.messages.base import Event, Message
from windlass.actors.messages.params import ParamsArrived, ParamsCopied, RequestParams
from windlass.actors.messages.ssd import ChunkIoDone, ReadChunks, WriteChunks
from windlass.storage.ids import ActorName

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class FailureKind(StrEnum):
    """The kinds of failures, by the chances of another attempt."""

    LASTING = "lasting"  # permanent: another attempt would fail too, for example on a broken disk or a wrong input
    NO_ROOM = "no_room"  # a disk is full; another attempt can succeed once there is space
    STALLED = "stalled"  # timeout; another attempt, in new processes, may succeed
    UNFORESEEN = "unforeseen"  # an unexpected error, or a lost connection; treated like the death of the process

    @classmethod
    def of(cls, error: Exception) -> "FailureKind":
        """Returns the kind of an error that an actor raised.

        Expected errors have classes of windlass, or are a ValueError or an OSError.
        """
        if isinstance(error, TimeoutError):
            return cls.STALLED
        if getattr(error, "errno", None) in _FULL:
            return cls.NO_ROOM
        if isinstance(error, ConnectionError):
            return cls.UNFORESEEN
        is_named = type(error).__module__.startswith("windlass.") or isinstance(error, ValueError | OSError)
        return cls.LASTING if is_named else cls.UNFORESEEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFailed(Event):
    """Reports an actor's error. It ends the attempt."""

    kind: FailureKind
    error: str  # one line for users: the problem, with its values, and the remedy
    detail: str  # traceback
    room_path: str = ""  # the directory whose disk had too little space; "" for other failures
    room_nbytes: int = 0  # bytes that must be free there before another attempt

    @classmethod
    def of(cls, error: Exception, *, actor: ActorName, about: Message) -> "ActorFailed":
        """Returns the message about `error`, which must be the exception being handled.

        `about` is the message that the actor was working on. A plain `Message` means that it was idle.
        """
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return cls(
            job=about.job,
            step=about.step,
            actor=actor,
            kind=FailureKind.of(error),
            error=text if type(about) is Message else f"{text} (at {in_words(about)})",
            detail="".join(traceback.format_exception(error)),
            room_path=(path := getattr(error, "directory", "")),
            room_nbytes=error.needed_nbytes if path else 0,  # type: ignore[attr-defined]
        )


def in_words(message: Message) -> str:
    """Describes a message for an error text, such as "compute block, backward, of step 3, block 2"."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", " ", type(message).__name__).lower()
    if phase := getattr(message, "phase", None):
        words += f", {phase},"
    block = getattr(message, "block", None)
    if isinstance(message, ReadChunks | WriteChunks):
        block = message.items[0].key.block  # all chunks of a request belong to one block
    if isinstance(message, ChunkIoDone):
        block = message.key.block
    if isinstance(message, RequestParams | ParamsArrived | ParamsCopied):
        block = message.use.block
    return f"{words} of step {message.step}" + ("" if block is None else f", block {block}")
