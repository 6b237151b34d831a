"""The first box's part in a move: the order of its steps, and the one moment from which it counts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from windlass.actors.job import JobSpec
from windlass.actors.runtime import decide, decisions_path, recovery_of
from windlass.actors.runtime.moving.division import BlocksMoved, MoveSpec
from windlass.engine.model import ModelLayout
from windlass.storage.ids import LayoutEpoch, Step
from windlass.storage.integrity import StoreError
from windlass.storage.store import Recovery, StoreJournal, last_decision, recover


class CallMovers(Protocol):
    """Calls a method of the movers of all boxes, and returns the results in the order of the boxes."""

    def __call__(self, method: str, *arguments: object) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The end of a move: all states are where the new division wants them."""

    step: Step | None  # of the commit that was moved; None: there is none, or it was moved by an earlier attempt
    blocks: tuple[BlocksMoved, ...]  # between boxes; empty without a step


class LeadMove:
    """Moves the states of a job's last commit to a new division.

    All states are copied into new stores beside the old ones, and committed there. Then one record in the log of
    decisions says that the new division counts, and the old stores are deleted. So at any moment one division has all
    states. A move that was cut off is begun again, or only its old stores are left to delete.
    """

    def __init__(self, spec: MoveSpec, layout: ModelLayout, call: CallMovers) -> None:
        """`spec`: the move as the first box sees it."""
        assert spec.old is not None, "the first box is in both divisions"
        assert spec.new is not None, "the first box is in both divisions"
        self._spec, self._layout, self._call = spec, layout, call
        self._before, self._after = spec.old, spec.new
        # The division that counts if the move ends now: stores of the other one may be deleted. None: it is not known.
        self.kept: LayoutEpoch | None = None

    def run(self) -> Moved:
        """Carries out the move.

        Raises:
            StoreCorrupt: a box lacks the commit.
            PlanError, InsufficientSpaceError: a box has no room.
            The errors of calls.
        """
        before, after = self._before, self._after
        looked: Sequence[tuple[tuple[StoreJournal, ...], tuple[StoreJournal, ...]]] = self._call("look")
        old, new = (_all(each[index] for each in looked) for index in (0, 1))
        # Without a commit the job begins with the new division.
        if _is_decided(before, after, old, new) or recovery_of(before, old).resume_from is None:
            self._finish()
            return Moved(step=None, blocks=())
        self.kept = before.layout_epoch
        # Journals and log are read again, because an older attempt may have committed until its stores were fenced.
        recovery = recovery_of(before, _all(self._call("prepare")))
        commit = recovery.resume_from
        assert commit is not None, "the stores had a commit"
        decide(before, recovery)
        made = recover(_all(self._call("move", commit)), None)
        assert made.resume_from is not None, "all movers have committed it"
        assert made.resume_from.step == commit.step, "movers commit the step that they move"
        self.kept = None  # until the record is durable
        decide(after, made)
        self._finish()
        return Moved(step=commit.step, blocks=tuple(self._spec.moved(self._layout)))

    def _finish(self) -> None:
        self.kept = self._after.layout_epoch
        self._call("finish", self.kept)


def _is_decided(before: JobSpec, after: JobSpec, old: tuple[StoreJournal, ...], new: tuple[StoreJournal, ...]) -> bool:
    """Returns whether the new division counts already. It does so from now on if the old one is not whole any more."""
    decision = last_decision(decisions_path(after))
    if decision is not None and decision.epoch > before.layout_epoch:
        if decision.epoch != after.layout_epoch:
            raise StoreError(
                f"job {after.job}: its blocks were moved already, in layout epoch {decision.epoch}, and this move is "
                f"to epoch {after.layout_epoch}: the job's specification is of another time"
            )
        return True
    # Old stores are deleted after the decision only. So if they are not whole, and all new ones are, the log is lost or
    # an old copy, or an SSD was lost just after the states had left it.
    made = _recovery_or_none(new)
    if made is None or made.resume_from is None or _recovery_or_none(old, before) is not None:
        return False
    latest = [record.step for journal in old for record in journal.records]
    if max(latest if decision is None else [*latest, decision.step], default=Step(0)) > made.resume_from.step:
        return False
    decide(after, made)
    return True


def _recovery_or_none(journals: tuple[StoreJournal, ...], lead: JobSpec | None = None) -> Recovery | None:
    """Returns the recovery from journals; None if they have no commit in common."""
    try:
        found = recover(journals, None) if lead is None else recovery_of(lead, journals)
    except StoreError:
        return None
    return found if found.resume_from is not None else None


def _all(journals: Iterable[tuple[StoreJournal, ...]]) -> tuple[StoreJournal, ...]:
    return tuple(journal for of_box in journals for journal in of_box)
