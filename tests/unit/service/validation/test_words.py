"""Counts and lists in words."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.service.validation.request_errors import plain_reason
from windlass.service.validation.text import count_text, told_jobs


def test_told_count_has_a_plural_for_all_but_one() -> None:
    assert [count_text(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_told_jobs_names_one_or_several() -> None:
    assert told_jobs(["ftjob-1"]) == "job ftjob-1"
    assert told_jobs(["ftjob-1", "ftjob-2"]) == "jobs ftjob-1, ftjob-2"


class _Part(BaseModel):
    count: int = 1


class _Request(BaseModel):
    model_config = ConfigDict(strict=True)

    number: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    switch: bool = False
    part: _Part | None = None


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"number": "small"}, "must be a number"),
        ({"number": -1.0}, "must be greater than or equal to 0"),
        ({"number": float("inf")}, "must be a finite number"),
        ({"switch": "on"}, "must be true or false"),
        ({"part": "rtx4090-server"}, "must be an object with keys and values"),
        ({"part": {"count": 1.5}}, "must be a whole number"),
    ],
)
def test_plain_reason_uses_no_words_of_the_validator(request_: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Request.model_validate(request_)
    assert [plain_reason(problem) for problem in caught.value.errors()] == [reason]
