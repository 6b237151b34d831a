"""The replies that the scheduler waits for, each with a timeout."""

from dataclasses import dataclass
from typing import NamedTuple

from windlass.actors.messages import (
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ComputeBlocks,
    ExportModel,
    FlushBlock,
    GradReady,
    LoadModel,
    Message,
    ModelExported,
    ModelLoaded,
    Phase,
    RestoreStates,
    StatesRestored,
    StoreCommitted,
)
from windlass.storage.ids import ActorName, BlockIndex, Step

_WHOLE_MODEL = BlockIndex(-1)


@dataclass(frozen=True, slots=True)
class Instruction:
    """A message and its receiver."""

    to: ActorName
    message: Message


class ReplyKey(NamedTuple):
    """Names a reply. No two pending replies have the same key."""

    event: type[Message]
    number: int  # the step or, for BlockComputed, the number of the operation
    actor: ActorName
    block: BlockIndex = _WHOLE_MODEL


class Wait(NamedTuple):
    """A pending reply."""

    since_s: float  # time of the request
    reply: ReplyKey
    operation: ComputeBlock | None = None  # that a BlockComputed or a GradReady is about

    @property
    def actor(self) -> ActorName:
        """The actor that must reply."""
        return self.reply.actor

    @property
    def what(self) -> str:
        """A description with step and block, for error texts. It is made on demand, because hardly any is read."""
        event, number, _, block = self.reply
        if self.operation is not None:
            task = f"the {self.operation.phase}" if event is BlockComputed else "the gradient"
            return f"{task} of block {block} in step {self.operation.step}"
        if event is BlockUpdated:
            return f"the update of block {block} in step {number}"
        if event is BlockFlushed:
            return f"the flush of block {block}, as step {number} left it"
        return _OF_WHOLE_MODEL[event].format(step=number)


_OF_WHOLE_MODEL: dict[type[Message], str] = {
    ModelLoaded: "loading the model",
    StatesRestored: "reading the states of step {step} into memory",
    StoreCommitted: "the commit of step {step}",
    ModelExported: "the export of step {step}",
}


class DeadlineMissedError(Exception):
    """An actor that must reply has sent no reply and no progress for longer than the job's timeout."""

    def __init__(self, message: str, late: tuple[ActorName, ...] = ()) -> None:
        """`late` has the actors that were silent, if the scheduler has noticed it."""
        super().__init__(message, late)
        self.late = late

    def __str__(self) -> str:
        return str(self.args[0])


class UnexpectedEventError(Exception):
    """An event without a request: a bug, or an actor of another attempt."""


class PendingReplies:
    """The pending replies of all actors."""

    def __init__(self, deadline_s: float, num_groups: int) -> None:
        """`num_groups` is the number of micro-batch groups of a step. The last one completes the gradients."""
        self.outstanding: dict[ReplyKey, Wait] = {}
        self._deadline_s = deadline_s
        self._last_group = num_groups - 1
        self._last_heard_s: dict[ActorName, float] = {}
        self._excused: frozenset[ActorName] = frozenset()  # actors that wait for another one

    def issue(self, instructions: list[Instruction], now_s: float) -> None:
        """Records the replies to these instructions as pending."""
        for instruction in instructions:
            for reply, operation in self._replies(instruction.message, instruction.to):
                self.outstanding[reply] = Wait(now_s, reply, operation)

    def expect_update(self, step: Step, block: BlockIndex, actor: ActorName, now_s: float) -> None:
        """Records that an actor must still report the update of its share of a block, whose gradient it has."""
        reply = ReplyKey(BlockUpdated, step, actor, block)
        self.outstanding[reply] = Wait(now_s, reply)

    def resolve(self, event: type[Message], number: int, actor: ActorName, block: BlockIndex = _WHOLE_MODEL) -> None:
        """Removes a reply that has arrived. Raises UnexpectedEventError if it was not pending."""
        self.require(event, number, actor, block)
        del self.outstanding[ReplyKey(event, number, actor, block)]

    def require(self, event: type[Message], number: int, actor: ActorName, block: BlockIndex = _WHOLE_MODEL) -> None:
        """Raises UnexpectedEventError if a reply that has arrived is not pending."""
        if ReplyKey(event, number, actor, block) not in self.outstanding:
            of_block = "" if block == _WHOLE_MODEL else f", block {block}"
            raise UnexpectedEventError(f"{actor} sent {event.__name__} of {number}{of_block}, which was not requested")

    def heard_from(self, actor: ActorName, now_s: float) -> None:
        """Records a sign of life of an actor. The timeout of all its replies starts anew."""
        self._last_heard_s[actor] = now_s

    def excuse(self, actors: frozenset[ActorName], now_s: float) -> None:
        """Records which actors wait for another one now: they are not late, whatever replies they have pending.

        The timeouts of those that wait no longer start anew.
        """
        for actor in self._excused - actors:
            self.heard_from(actor, now_s)
        self._excused = actors

    def check(self, now_s: float) -> None:
        """Raises DeadlineMissedError if actors with pending replies have been silent for too long.

        If all of them wait for another one, which only a defect can cause, none is excused. The error names all late
        ones, because one may hang while others are only slow. For each it names the oldest reply.
        """
        late: dict[ActorName, Wait] = {}
        waits = list(self.outstanding.values())
        waits = [wait for wait in waits if wait.actor not in self._excused] or waits
        for wait in sorted(waits, key=lambda wait: (-self._silent_s(wait, now_s), wait.since_s)):
            if self._silent_s(wait, now_s) > self._deadline_s:
                late.setdefault(wait.actor, wait)
        if late:
            texts = (
                f"{actor} has been silent for {self._silent_s(wait, now_s):.1f} s; its oldest pending reply is "
                f"{wait.what}"
                for actor, wait in late.items()
            )
            text = f"{'; '.join(texts)}; see its log, and the health of the device it uses"
            raise DeadlineMissedError(text, tuple(late))

    def _silent_s(self, wait: Wait, now_s: float) -> float:
        return now_s - max(wait.since_s, self._last_heard_s.get(wait.actor, 0.0))

    def _replies(self, message: Message, to: ActorName) -> list[tuple[ReplyKey, ComputeBlock | None]]:
        """Returns the keys of the replies to an instruction, each with the operation that it is about."""
        step = message.step
        match message:
            case ComputeBlocks():
                return [reply for operation in message.operations for reply in self._of_operation(operation, to)]
            case LoadModel():
                return [(ReplyKey(ModelLoaded, step, to), None)]
            case RestoreStates():
                return [(ReplyKey(StatesRestored, step, to), None)]
            case FlushBlock():
                return [(ReplyKey(BlockFlushed, step, to, message.block), None)]
            case CommitStore():
                return [(ReplyKey(StoreCommitted, step, to), None)]
            case ExportModel():
                return [(ReplyKey(ModelExported, step, to), None)]
            case _:
                return []

    def _of_operation(self, operation: ComputeBlock, to: ActorName) -> list[tuple[ReplyKey, ComputeBlock | None]]:
        computed = ReplyKey(BlockComputed, operation.op, to, operation.block)
        if not completes_gradient(operation, self._last_group):
            return [(computed, operation)]
        return [(computed, operation), (ReplyKey(GradReady, operation.step, to, operation.block), operation)]


def completes_gradient(operation: ComputeBlock, last_group: int) -> bool:
    """Returns whether an operation is the last one that adds to its block's gradient."""
    return operation.phase in (Phase.HEAD, Phase.BACKWARD) and operation.group == last_group
