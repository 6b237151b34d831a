"""Settings that take values of several kinds: "auto" or a number, a number or names. Their checks and descriptions."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from windlass.engine.memory_plan import LEAST_CUT_NUMEL, UpdateOrder

# Limits of requests for jobs and plans, of the command line's options and of the dashboard's form.
MAX_BATCH_SIZE = 4096  # examples of a job's step
MAX_PLANNED_BATCH_SIZE = 65_536  # examples of a planned step, which may be larger than a job's
LEAST_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH = 8, 1_048_576  # tokens of an example
MAX_EXAMPLES = 2**31 - 1  # of a file
MAX_EPOCHS = 1000
MAX_GPUS = 16  # of one box
MAX_BOXES = 16  # of one job
MOST_CUT_NUMEL = 2**40


def auto_or_int(low: int, high: int) -> Callable[[Any], Any]:
    """Returns a check that takes "auto" or a whole number in this range. Checks raise ValueError."""

    def check(value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
            return value
        raise ValueError(f'must be "auto" or a whole number from {low} to {high}')

    return check


def described_as(number: dict[str, Any]) -> WithJsonSchema:
    """Returns the description of a field that takes "auto" or a number."""
    return WithJsonSchema({"anyOf": [{"const": "auto", "type": "string"}, number]})


def auto_or_positive(value: Any) -> Any:
    """Checks a value that is "auto" or a number above 0, at most 1000."""
    if value == "auto":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1000:
        return float(value)
    raise ValueError('must be "auto" or a number above 0, at most 1000')


def auto_or_number(low: int, high: int) -> Callable[[Any], Any]:
    """Returns a check that takes "auto" and null as one."""
    check = auto_or_int(low, high)

    def check_or_null(value: Any) -> Any:
        return None if value in (None, "auto") else check(value)

    return check_or_null


def cut_of_matrices(value: Any) -> Any:
    """Checks a value that is "auto", "off", or the most elements of a piece of a matrix."""
    if value in ("auto", "off"):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and LEAST_CUT_NUMEL <= value <= MOST_CUT_NUMEL:
        return value
    raise ValueError(f'must be "auto", "off" or a whole number of elements from {LEAST_CUT_NUMEL} to {MOST_CUT_NUMEL}')


def auto_or_order(value: Any) -> Any:
    """Checks a value that is "auto" or an order of updates, which it returns."""
    if value == "auto":
        return value
    if value in list(UpdateOrder):
        return UpdateOrder(value)
    raise ValueError(f"must be one of {', '.join(('auto', *UpdateOrder))}")


GpuNumber = Annotated[
    int | Literal["auto"],
    PlainValidator(auto_or_int(1, MAX_GPUS)),
    described_as({"type": "integer", "minimum": 1, "maximum": MAX_GPUS}),
]


def _check_boxes(value: Any) -> Any:
    """Returns a number of boxes, or their names. One box is what a job is to go on on, in place of several."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_BOXES:
        return value
    if isinstance(value, list | tuple) and all(isinstance(name, str) and 1 <= len(name) <= 64 for name in value):
        if not 1 <= len(value) <= MAX_BOXES:
            raise ValueError(f"must name 1 to {MAX_BOXES} boxes")
        if len(set(value)) < len(value):
            raise ValueError("must name each box once")
        return list(value)
    raise ValueError(f"must be a number of boxes from 1 to {MAX_BOXES}, or a list of their names")


# A number of boxes, or their names; null: none.
Boxes = Annotated[
    int | list[str] | None,
    PlainValidator(_check_boxes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_BOXES},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 64},
                    "minItems": 1,
                    "maxItems": MAX_BOXES,
                    "uniqueItems": True,
                },
                {"type": "null"},
            ]
        }
    ),
]
