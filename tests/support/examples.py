"""The number of examples of a property test: in `make test` a fifth of those in `make test-long`."""

import os

LONG_VARIABLE = "WINDLASS_TEST_LONG"  # set to 1 by `make test-long`


def examples(number: int) -> int:
    """The number of examples in this run, of the `number` that `make test-long` tries."""
    return number if os.environ.get(LONG_VARIABLE) == "1" else max(1, number // 5)
