"""The replies that the scheduler waits for, each with a timeout."""

from dataclasses import dataclass

from windlass.actors.messages import (
    CommitStore,
    ComputeBlock,
    ExportModel,
    FlushBlock,
    LoadModel,
    Message,
    OffloadGrad,
    Phase,
    RestoreStates,
    UpdateBlock,
)
from windlass.storage.ids import ActorName


@dataclass(frozen=True, slots=True)
class Instruction:
    """A message and its receiver."""

    to: ActorName
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A pending reply."""

    since_s: float  # time of the request
    actor: ActorName  # the actor that must reply
    what: str  # description with step and block, for error texts


class DeadlineMissedError(Exception):
    """An actor that must reply has sent no message for longer than the job's timeout."""


class UnexpectedEventError(Exception):
    """An event without a request: a bug, or an actor of another attempt."""


class PendingReplies:
    """The pending replies, by kind, number (a step or an operation), block and actor."""

    def __init__(self, deadline_s: float, num_groups: int) -> None:
        """`num_groups` is the number of micro-batch groups of a step. The last one completes the gradients."""
        self.outstanding: dict[tuple[str, int, int, ActorName], Wait] = {}
        self._deadline_s = deadline_s
        self._last_group = num_groups - 1
        self._last_heard_s: dict[ActorName, float] = {}

    def issue(self, instructions: list[Instruction], now_s: float) -> list[Instruction]:
        """Records the replies to these instructions as pending, and returns the instructions."""
        for instruction in instructions:
            for key, what in _waits_of(instruction.message, self._last_group):
                wait = Wait(since_s=now_s, actor=instruction.to, what=what)
                self.outstanding[(*key, instruction.to)] = wait
        return instructions

    def settle(self, kind: str, number: int, block: int, actor: ActorName) -> None:
        """Removes a reply that has arrived. Raises UnexpectedEventError if it was not pending."""
        if self.outstanding.pop((kind, number, block, actor), None) is None:
            raise UnexpectedEventError(f"{actor} reported a {kind} of {number}, block {block}, that was not requested")

    def heard_from(self, actor: ActorName, now_s: float) -> None:
        """Records a sign of life of an actor. The timeout of all its replies starts anew."""
        self._last_heard_s[actor] = now_s

    def most_silent(self, now_s: float) -> Wait | None:
        """Returns the pending reply of the actor that has been silent longest; of several, the first requested."""
        return max(self.outstanding.values(), key=lambda wait: self._silent_s(wait, now_s), default=None)

    def check(self, now_s: float) -> None:
        """Raises DeadlineMissedError if actors with pending replies have been silent for too long.

        The error names all of them, because one may hang while others are only slow. For each it names the oldest
        reply.
        """
        late: dict[ActorName, Wait] = {}
        for wait in sorted(self.outstanding.values(), key=lambda wait: self._silent_s(wait, now_s), reverse=True):
            if self._silent_s(wait, now_s) > self._deadline_s:
                late.setdefault(wait.actor, wait)
        if late:
            texts = (f"{wait.actor} did not finish {wait.what} within {self._deadline_s:g} s" for wait in late.values())
            raise DeadlineMissedError(f"{'; '.join(texts)}; see its log, and the health of the device it uses")

    def _silent_s(self, wait: Wait, now_s: float) -> float:
        return now_s - max(wait.since_s, self._last_heard_s.get(wait.actor, 0.0))


def _waits_of(message: Message, last_group: int) -> list[tuple[tuple[str, int, int], str]]:
    """Returns the keys of the replies to an instruction, each with its description for error texts."""
    match message:
        case LoadModel():
            return [(("load", 0, 0), "loading the model")]
        case RestoreStates():
            return [(("restore", message.step, 0), f"reading the states of step {message.step} into memory")]
        case ComputeBlock():
            where = f"of block {message.block} in step {message.step}"
            computed = (("compute", message.op, message.block), f"the {message.phase} {where}")
            if message.phase not in (Phase.HEAD, Phase.BACKWARD) or message.group < last_group:
                return [computed]
            return [computed, (("gradient", message.step, message.block), f"the gradient {where}")]
        case OffloadGrad():
            what = f"the gradient offload of block {message.block} in step {message.step}"
            return [(("offload", message.step, message.block), what)]
        case UpdateBlock():
            what = f"the update of block {message.block} in step {message.step}"
            return [(("update", message.step, message.block), what)]
        case FlushBlock():
            what = f"the flush of block {message.block}, as step {message.step} left it"
            return [(("flush", message.step, message.block), what)]
        case CommitStore():
            return [(("commit", message.step, 0), f"the commit of step {message.step}")]
        case ExportModel():
            return [(("export", message.step, 0), f"the export of step {message.step}")]
        case _:
            return []
