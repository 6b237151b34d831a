"""The message about a failure, and descriptions of messages for people."""

import errno
import re
import traceback
from dataclasses import dataclass
from enum import StrEnum

from windlass.actors.messages.base import Message
from windlass.actors.messages.optimizer import ParamSlotReleased
from windlass.actors.messages.ssd import ChunkIoDone, ReadChunks, WriteChunks
from windlass.storage.ids import ActorName

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class FailureKind(StrEnum):
    """What a failure says of another attempt."""

    LASTING = "lasting"  # it would only fail again: a broken disk, a wrong input
    NO_ROOM = "no_room"  # a disk is full; where there is room again, another attempt gets on
    STALLED = "stalled"  # something did not come in time; in other processes it may
    UNFORESEEN = "unforeseen"  # nobody has a name for it: as good as the death of the process

    @classmethod
    def of(cls, error: Exception) -> "FailureKind":
        """Of what an actor raised. What the house foresees has a class of its own, or is a wrong value or a file's."""
        if isinstance(error, TimeoutError):
            return cls.STALLED
        if getattr(error, "errno", None) in _FULL:
            return cls.NO_ROOM
        is_named = type(error).__module__.startswith("windlass.") or isinstance(error, ValueError | OSError)
        return cls.LASTING if is_named else cls.UNFORESEEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFailed(Message):
    """Something an actor could not do. The attempt ends."""

    actor: ActorName
    kind: FailureKind
    error: str  # one line for people: what was wrong, with the values, and what to do
    detail: str  # traceback
    room_path: str = ""  # the directory whose disk had too little room; "" for other failures
    room_nbytes: int = 0  # that must be free there for another attempt

    @classmethod
    def of(cls, error: Exception, *, actor: ActorName, about: Message) -> "ActorFailed":
        """The failure that is being handled. `about`: what the actor was working on; a plain Message: on nothing."""
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
    """What a message is and what it is about, for people: "compute block, backward, of step 3, block 2"."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", " ", type(message).__name__).lower()
    if phase := getattr(message, "phase", None):
        words += f", {phase},"
    block = getattr(message, "block", None)
    if isinstance(message, ReadChunks | WriteChunks):
        block = message.items[0].key.block  # a request is about one
    if isinstance(message, ChunkIoDone | ParamSlotReleased):
        block = message.key.block
    return f"{words} of step {message.step}" + ("" if block is None else f", block {block}")
