"""Decides from which commit a job resumes, by the journals of all its SSDs and the log of decisions. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.storage.ids import Step
from windlass.storage.integrity import StoreCorrupt
from windlass.storage.store.decisions import Decision, digest_of
from windlass.storage.store.format import CommitRecord


@dataclass(frozen=True, slots=True)
class StoreJournal:
    """The commits on one SSD of a job."""

    where: str  # the SSD, and its box if the job has several; for messages
    records: tuple[CommitRecord, ...]  # oldest first


@dataclass(frozen=True, slots=True)
class Recovery:
    """The commit from which a job resumes, and the decision to write first."""

    resume_from: CommitRecord | None  # None: the job begins
    decision: Decision | None = None  # None: the log has it, or there is no commit


def recover(
    journals: Sequence[StoreJournal], decision: Decision | None, *, last_checkpoint: Step | None = None
) -> Recovery:
    """Returns the newest commit that all SSDs of a job have.

    Records of different attempts or layout epochs never match, because their states may have different histories. A
    commit that all SSDs have, but that was not decided, is decided now: a crash came between the last SSD's commit and
    the decision. SSDs that have a later, undecided commit go back. Without a log, the decided step that the records
    repeat counts.

    Args:
        journals: of every SSD of every box of the job. Without SSDs there is never a commit.
        decision: the last one in the log, None without a log.
        last_checkpoint: the step of the job's last checkpoint, for the error's text.

    Raises:
        StoreCorrupt: a decided commit is missing on an SSD, or is another one than the log's.
    """
    if not journals:
        return Recovery(None)
    commit = _newest_common(journals)
    known = [record.decided for journal in journals for record in journal.records if record.decided is not None]
    decided = max(known if decision is None else [*known, decision.step], default=None)
    if decided is not None and (commit is None or commit.step < decided):
        raise StoreCorrupt(_lost_text(journals, decided, last_checkpoint))
    # Journals of older versions repeat no decision. Even so, step 1 is written only after every SSD has step 0.
    if commit is None and any(record.step for journal in journals for record in journal.records):
        raise StoreCorrupt(_lost_text(journals, None, last_checkpoint))
    if commit is None:
        return Recovery(None)
    if decision is None or decision.step < commit.step:
        return Recovery(commit, Decision.of(commit))
    if decision.digest != digest_of(commit.trainer_state):
        raise StoreCorrupt(
            f"the states of step {commit.step} on the job's SSDs ({_names(journals)}) are not those that the job "
            f"committed: the SSDs or the job's folder are copies from another time; {_advice(last_checkpoint)}"
        )
    return Recovery(commit)


def _newest_common(journals: Sequence[StoreJournal]) -> CommitRecord | None:
    newest = max(set.intersection(*({each.identity for each in journal.records} for journal in journals)), default=None)
    return next((record for journal in journals for record in journal.records if record.identity == newest), None)


def _lost_text(journals: Sequence[StoreJournal], decided: Step | None, last_checkpoint: Step | None) -> str:
    lacking = [journal for journal in journals if all(record.step != decided for record in journal.records)]
    last_steps = (max((record.step for record in journal.records), default="none") for journal in journals)
    lasts = ", ".join(f"{journal.where}: {step}" for journal, step in zip(journals, last_steps, strict=True))
    if not any(journal.records for journal in journals):
        return (
            f"the job committed step {decided}, and none of its SSDs ({_names(journals)}) has its states: they are not "
            f"mounted, were emptied, or are others; {_advice(last_checkpoint)}, or submit the job again"
        )
    lost = (
        "the job's SSDs have no commit in common"
        if decided is None
        else f"the job committed step {decided} on all its SSDs, and {_names(lacking or journals)} has no intact "
        "record of it"
    )
    return (
        f"{lost} (their last steps are {lasts}): an SSD has lost its journal, or is not the one that the job used; "
        f"{_advice(last_checkpoint)}"
    )


def _advice(last_checkpoint: Step | None) -> str:
    checkpoint = "a checkpoint" if last_checkpoint is None else f"the last checkpoint, that of step {last_checkpoint}"
    return f"put the right one in its place, or start again from {checkpoint}"


def _names(journals: Sequence[StoreJournal]) -> str:
    return " and ".join(journal.where for journal in journals)
