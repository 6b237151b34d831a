"""The base of every message between actors."""

from dataclasses import dataclass

from windlass.storage.ids import ActorName, JobId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages."""

    job: JobId
    step: Step  # the step that the message is about; for a command, the step whose states the command produces


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Message):
    """Base of all reports of actors to the scheduler."""

    actor: ActorName  # the sender
