"""Every cut of the commit over several SSDs, in a model: any order of messages, crashes, lost logs, torn entries.

The scheduler's side is the real policy and the real recovery; an SSD is a model of one chunk with two extents.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.policy.jobs import make_shape
from windlass.actors.messages import CommitDecided, CommitStore
from windlass.actors.policy.commits import Commits
from windlass.actors.policy.pending_replies import Instruction
from windlass.storage.ids import FIRST_EPOCH, ActorName, Attempt, BlockIndex, Rank, Step
from windlass.storage.store.decisions import Decision
from windlass.storage.store.format import CommitRecord
from windlass.storage.store.recovery import Recovery, StoreJournal, recover

NUM_BLOCKS = 2
_EVENTS = ("written", "committed")  # messages to the scheduler; other texts are states to write


class Ssd:
    """One SSD: its durable journal and extents, and the memory of its running server."""

    def __init__(self, name: ActorName) -> None:
        self.name = name
        self.records: list[CommitRecord] = []
        self.extents: list[str | None] = [None, None]  # the trainer's state of the step whose states lie there
        self.committed: CommitRecord | None = None
        self.is_decided = True
        self.working: str | None = None  # the state that the next commit would have

    def resume(self, commit: CommitRecord | None, attempt: int) -> None:
        self.committed, self.is_decided, self.working = None, True, None
        if commit is None:
            return
        (mine,) = [each for each in self.records if each.identity == commit.identity]
        self.committed = replace(mine, sequence=len(self.records), attempt=Attempt(attempt), decided=mine.step)
        self.records.append(self.committed)

    def write(self, state: str) -> None:
        assert self.is_decided, "the gate holds the write until the decision"
        self.extents[self._free_extent()] = self.working = state

    def commit(self, step: Step, attempt: int, state: str) -> None:
        assert self.is_decided
        assert self.working == state
        self.committed = CommitRecord(
            sequence=len(self.records),
            step=step,
            attempt=Attempt(attempt),
            rank=Rank(0),
            manifest=self._free_extent(),
            manifest_digest=0,
            trainer_state=state,
            decided=None if self.committed is None else self.committed.step,
        )
        self.records.append(self.committed)
        self.is_decided = False

    def decide(self, step: Step) -> None:
        if self.committed is not None and step == self.committed.step:
            self.is_decided = True

    def _free_extent(self) -> int:
        return 0 if self.committed is None else 1 - self.committed.manifest


class Job:
    """A job over several SSDs. `choices` are the things that may happen next."""

    def __init__(self, num_ssds: int, *, is_hasty: bool = False) -> None:
        """`is_hasty`: the next step is written without a wait for the commit, which only a defect would do."""
        self.is_hasty = is_hasty
        self.shape = make_shape(chunks_per_block=(1,) * NUM_BLOCKS, total_steps=1000, num_ssds=num_ssds)
        self.ssds = {name: Ssd(name) for name in self.shape.ssd_servers}
        self.log: list[Decision] = []
        self.acknowledged = -1  # the last step that anyone outside may have seen as committed
        self.attempt = 0
        self.crash()

    def crash(self) -> None:
        """Ends the attempt: messages and memory are lost. The next attempt gathers the journals first."""
        self.attempt += 1
        self.messages: list[tuple[ActorName, object]] = []
        self.commits: Commits | None = None
        self.num_written = 0
        self.to_resume: set[ActorName] = set()
        self.start: Recovery | None = None

    def lose_log(self, num_left: int) -> None:
        """Ends the attempt, and restores the lead box's folder from an old copy, or without the log."""
        self.crash()
        del self.log[num_left:]

    def choices(self) -> list[Callable[[], None]]:
        if self.commits is None:
            if self.start is None:
                return [self._gather]
            if self.to_resume:
                return [partial(self._resume, name) for name in sorted(self.to_resume)]
            return [self._begin]
        able = [each for each in self.messages if self._is_possible(*each)]
        return [partial(self._deliver, *each) for each in able]

    def _gather(self) -> None:
        journals = [StoreJournal(name, tuple(ssd.records)) for name, ssd in self.ssds.items()]
        last = max(self.log, key=lambda decision: decision.step, default=None)
        recovery = recover(journals, last)
        commit = recovery.resume_from
        assert (-1 if commit is None else commit.step) >= self.acknowledged
        if commit is not None:
            for ssd in self.ssds.values():
                (mine,) = [each for each in ssd.records if each.identity == commit.identity]
                assert ssd.extents[mine.manifest] == commit.trainer_state, "the states of the commit are overwritten"
        if recovery.decision is not None:
            self.log.append(recovery.decision)
        self.start, self.to_resume = recovery, set(self.ssds)

    def _resume(self, name: ActorName) -> None:
        assert self.start is not None
        self.to_resume.remove(name)
        self.ssds[name].resume(self.start.resume_from, self.attempt)

    def _begin(self) -> None:
        assert self.start is not None
        commit = self.start.resume_from
        self.commits = Commits(self.shape, None if commit is None else commit.step)
        self.acknowledged = max(self.acknowledged, self.commits.committed)
        self._next_step()
        self._send_writes(self.step)

    def _next_step(self) -> None:
        assert self.commits is not None
        self.step = Step(self.commits.committed + 1)
        self.state = f"{self.step} of attempt {self.attempt}"
        assert self.step == 0 or self.commits.may_update(self.step)

    def _send_writes(self, step: int) -> None:
        self.messages += [(name, f"{step} of attempt {self.attempt}") for name in self.ssds]

    def _is_possible(self, name: ActorName, message: object) -> bool:
        return not isinstance(message, str) or message in _EVENTS or self.ssds[name].is_decided

    def _deliver(self, name: ActorName, message: object) -> None:
        self.messages.remove((name, message))
        ssd = self.ssds[name]
        match message:
            case CommitStore() if ssd.working != self.state:
                assert self.is_hasty
                self.crash()  # the store refuses the commit, because the next step has been begun
            case CommitStore():
                ssd.commit(message.step, self.attempt, self.state)
                self.messages.append((name, "committed"))
            case CommitDecided():
                ssd.decide(message.step)
            case "written":
                self._written(name)
            case "committed":
                self._committed(name)
            case str():
                ssd.write(message)
                self.messages.append((name, "written"))

    def _written(self, name: ActorName) -> None:
        assert self.commits is not None
        self.num_written += 1
        if self.num_written % len(self.ssds):
            return
        if self.step == 0:
            self.commits.model_loaded()
        else:
            for block in range(NUM_BLOCKS):
                self.commits.block_updated(BlockIndex(block), self.step)
            self.commits.step_over(self.step)
        self._send(self.commits.advance(is_computing=False))
        if self.is_hasty:
            self._send_writes(self.step + 1)

    def _committed(self, name: ActorName) -> None:
        """The scheduler hears of a commit. A crash may come before and after the decision is in the log."""
        assert self.commits is not None
        if self.commits.store_committed(self.step, name):
            assert self.commits.committed < self.step
            self.log.append(
                Decision.make(
                    step=self.step,
                    attempt=Attempt(self.attempt),
                    epoch=FIRST_EPOCH,
                    trainer_state=self.state,
                )
            )
            self._send(self.commits.decided(self.step))
            self.acknowledged = self.commits.committed
            self._next_step()
            if not self.is_hasty:
                self._send_writes(self.step)

    def _send(self, instructions: list[Instruction]) -> None:
        self.messages += [(instruction.to, instruction.message) for instruction in instructions]


@settings(max_examples=examples(600), deadline=None)
@given(
    num_ssds=st.integers(1, 3),
    is_hasty=st.booleans(),
    chances=st.lists(st.integers(0, 1199), min_size=40, max_size=160),
)
def test_no_cut_loses_an_acknowledged_step_or_the_states_of_the_one_to_resume_from(
    num_ssds: int, is_hasty: bool, chances: list[int]
) -> None:
    job = Job(num_ssds, is_hasty=is_hasty)
    for chance in chances:
        if chance % 40 == 39:
            job.crash()
        elif chance % 80 == 38:
            job.lose_log(chance // 80)
        else:
            choices = job.choices()
            choices[chance // 40 % len(choices)]()


def test_without_cuts_the_job_goes_on() -> None:
    job = Job(num_ssds=2)
    for _ in range(200):
        job.choices()[-1]()
    assert job.acknowledged > 10
