"""The commit from which a job resumes, by the journals of its SSDs and the log of decisions."""

from dataclasses import replace

import pytest

from tests.support.storage.stores import make_record
from windlass.storage.ids import LayoutEpoch, Step
from windlass.storage.integrity.errors import StoreCorrupt
from windlass.storage.store.decisions import Decision
from windlass.storage.store.format import CommitRecord
from windlass.storage.store.recovery import Recovery, StoreJournal, recover

Records = list[CommitRecord]


def journals(*records: Records) -> list[StoreJournal]:
    return [StoreJournal(f"box {i}, SSD /ssd{i}", tuple(each)) for i, each in enumerate(records)]


def newest(*records: Records) -> CommitRecord | None:
    """The commit to resume from without a log."""
    return recover(journals(*records), None).resume_from


def steps(first: int, last: int, attempt: int = 1) -> Records:
    """The entries of a run of steps, each with the decided step that the SSD knew."""
    entries = [make_record(step, step, attempt) for step in range(first, last + 1)]
    return [replace(entry, decided=Step(entry.step - 1) if entry.step else None) for entry in entries]


def test_newest_commit_that_all_ssds_have() -> None:
    a = [make_record(0, 0), make_record(1, 1), make_record(2, 2)]
    b = [make_record(7, 0), make_record(8, 1)]
    assert newest(a, b) == a[1]
    assert newest(b, a) == b[1]
    assert newest(a) == a[2]


def test_adopted_commit_wins_over_higher_steps_of_older_attempts() -> None:
    old = [make_record(sequence, sequence) for sequence in range(4)]
    adopted = make_record(4, 2, attempt=2)
    assert newest([*old, adopted], [*old, adopted]) == adopted
    # The crash came before the second SSD adopted it: the earlier commit still counts.
    assert newest([*old, adopted], old) == old[3]


def test_same_step_of_another_history_does_not_pair() -> None:
    a = [make_record(0, 0), make_record(1, 1, attempt=1, state="a")]
    others = (
        make_record(1, 1, attempt=2, state="a"),
        make_record(1, 1, attempt=1, state="b"),
        replace(a[1], epoch=LayoutEpoch(1)),
    )
    for other in others:
        assert newest(a, [make_record(0, 0), other]) == a[0]


def test_job_begins_if_there_is_no_commit_on_all() -> None:
    assert recover([], None) == Recovery(None)
    assert newest([], []) is None
    assert newest([make_record(0, 0), make_record(1, 0, attempt=2)], []) is None


@pytest.mark.parametrize("other", [[], [make_record(0, 0, attempt=9)]])
def test_lost_journal_is_not_a_new_job(other: Records) -> None:
    """An SSD was replaced, or is not mounted and an empty directory is in its place. No entry repeats a decision."""
    with pytest.raises(
        StoreCorrupt,
        match=r"no commit in common \(their last steps are box 0, SSD /ssd0: 5, box 1, SSD /ssd1: (none|0)\)",
    ):
        newest([make_record(0, 4), make_record(1, 5)], other)


def test_decided_commit_goes_on() -> None:
    run = steps(0, 5)
    assert recover(journals(run, run), Decision.of(run[5])) == Recovery(run[5])


def test_undecided_commit_that_all_have_is_decided_now() -> None:
    run = steps(0, 5)
    assert recover(journals(run, run), Decision.of(run[4])) == Recovery(run[5], Decision.of(run[5]))


def test_ssds_that_are_one_step_ahead_go_back() -> None:
    run = steps(0, 5)
    for number in range(1, 3):
        found = recover(journals(*[run] * number, *[run[:5]] * (3 - number)), Decision.of(run[4]))
        assert found == Recovery(run[4])


def test_lost_log_is_replaced_by_what_the_entries_repeat() -> None:
    run = steps(0, 5)
    assert recover(journals(run, run), None) == Recovery(run[5], Decision.of(run[5]))
    assert recover(journals(run, run[:5]), None) == Recovery(run[4], Decision.of(run[4]))
    with pytest.raises(StoreCorrupt, match="the job committed step 4 on all its SSDs, and box 1, SSD /ssd1 has no"):
        recover(journals(run, run[:4]), None)


def test_missing_decided_commit_names_box_and_ssd_and_the_last_checkpoint() -> None:
    run = steps(0, 5)
    text = (
        r"the job committed step 5 on all its SSDs, and box 1, SSD /ssd1 has no intact record of it \(their last steps "
        r"are box 0, SSD /ssd0: 5, box 1, SSD /ssd1: 4, box 2, SSD /ssd2: 5\): .* start again from the last "
        "checkpoint, that of step 3"
    )
    with pytest.raises(StoreCorrupt, match=text):
        recover(journals(run, run[:5], run), Decision.of(run[5]), last_checkpoint=Step(3))
    none = r"box 0, SSD /ssd0 and box 1, SSD /ssd1\) has its states.* again from a checkpoint, or submit"
    with pytest.raises(StoreCorrupt, match=none):
        recover(journals([], []), Decision.of(run[5]))


def test_log_that_is_older_than_the_entries_does_not_lead_back() -> None:
    """The job's folder was restored from a backup: the entries know later decisions."""
    run = steps(0, 5)
    assert recover(journals(run, run), Decision.of(run[2])) == Recovery(run[5], Decision.of(run[5]))
    with pytest.raises(StoreCorrupt, match="committed step 4"):
        recover(journals(run, run[:4]), Decision.of(run[2]))


def test_other_states_than_the_decided_ones_are_refused() -> None:
    run = steps(0, 5)
    other = Decision.of(replace(run[5], trainer_state='{"other": 1}'))
    with pytest.raises(StoreCorrupt, match=r"step 5 on the job's SSDs \(box 0, SSD /ssd0\) are not those"):
        recover(journals(run), other)
