"""What the scheduler has asked for and waits for, each with a deadline."""

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
    """A message and who gets it."""

    to: ActorName
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Something that was asked for and has not come yet."""

    since_s: float
    actor: ActorName
    what: str  # with step and block


class DeadlineMissedError(Exception):
    """Nothing came from an actor for longer than the job's deadline."""


class UnexpectedEventError(Exception):
    """An event that nothing asked for: a bug, or an actor of another attempt."""


class PendingReplies:
    """Everything that is outstanding, by kind, number (a step or an operation), block and actor."""

    def __init__(self, deadline_s: float, num_groups: int) -> None:
        """`num_groups`: of a step; the last one completes the gradients."""
        self.outstanding: dict[tuple[str, int, int, ActorName], Wait] = {}
        self._deadline_s = deadline_s
        self._last_group = num_groups - 1
        self._last_heard_s: dict[ActorName, float] = {}

    def issue(self, instructions: list[Instruction], now_s: float) -> list[Instruction]:
        """Notes what these instructions make the scheduler wait for, and returns them."""
        for instruction in instructions:
            for key, what in _waits_of(instruction.message, self._last_group):
                wait = Wait(since_s=now_s, actor=instruction.to, what=what)
                self.outstanding[(*key, instruction.to)] = wait
        return instructions

    def settle(self, kind: str, number: int, block: int, actor: ActorName) -> None:
        """It has come. Raises UnexpectedEventError for what nothing asked for."""
        if self.outstanding.pop((kind, number, block, actor), None) is None:
            raise UnexpectedEventError(f"{actor} reported a {kind} of {number}, block {block}, that nobody asked for")

    def heard_from(self, actor: ActorName, now_s: float) -> None:
        """The actor works: what it owes may take the whole deadline from now on."""
        self._last_heard_s[actor] = now_s

    def most_silent(self, now_s: float) -> Wait | None:
        """What is owed by the actor that was heard of longest ago; of several things, what was asked for first."""
        return max(self.outstanding.values(), key=lambda wait: self._silent_s(wait, now_s), default=None)

    def check(self, now_s: float) -> None:
        """Raises DeadlineMissedError when actors that owe something have been silent for too long.

        It names them all, as one of them may hang and the others only be slow; of what each owes, the oldest.
        """
        late: dict[ActorName, Wait] = {}
        for wait in sorted(self.outstanding.values(), key=lambda wait: self._silent_s(wait, now_s), reverse=True):
            if self._silent_s(wait, now_s) > self._deadline_s:
                late.setdefault(wait.actor, wait)
        if late:
            told = (f"{each.actor} did not finish {each.what} within {self._deadline_s:g} s" for each in late.values())
            raise DeadlineMissedError(f"{'; '.join(told)}; see its log, and the health of the device it uses")

    def _silent_s(self, wait: Wait, now_s: float) -> float:
        return now_s - max(wait.since_s, self._last_heard_s.get(wait.actor, 0.0))


def _waits_of(message: Message, last_group: int) -> list[tuple[tuple[str, int, int], str]]:
    """What an instruction makes the scheduler wait for, and its names for people."""
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
