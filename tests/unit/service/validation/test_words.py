"""Counts and lists in words."""

from windlass.service.validation.text import count_text, told_jobs


def test_told_count_has_a_plural_for_all_but_one() -> None:
    assert [count_text(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_told_jobs_names_one_or_several() -> None:
    assert told_jobs(["ftjob-1"]) == "job ftjob-1"
    assert told_jobs(["ftjob-1", "ftjob-2"]) == "jobs ftjob-1, ftjob-2"
