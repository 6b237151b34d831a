"""Values with shared parts are smaller, and restored as they were."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from windlass.planner.profiling.known.sharing import SHARED, with_shared_parts, without_shared_parts

TEXTS = st.sampled_from(["", "2 BHT", "2 BHT + 4 BT", "a longer formula", "16"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    TEXTS | st.integers(0, 3) | st.booleans(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(TEXTS, parts, max_size=4),
    max_leaves=30,
)


@given(st.dictionaries(st.sampled_from(["classes", "tied", "untied"]), VALUES))
def test_values_with_shared_parts_are_restored(values: dict[str, Any]) -> None:
    stored = json.loads(json.dumps(with_shared_parts(values)))
    assert json.dumps(without_shared_parts(stored)) == json.dumps(values)


def test_a_part_that_occurs_twice_is_stored_once() -> None:
    peaks = ["2 BHT + 4 BT", "4 BHT + 2 BT"]
    stored = with_shared_parts({"tied": {"a": [peaks, 1], "b": [peaks, 2]}, "untied": [peaks[0]]})
    assert json.dumps(stored).count(peaks[0]) == json.dumps(stored).count(peaks[1]) == 1
    assert len(stored[SHARED]) == 2  # the list, and the formula that occurs elsewhere, too
    assert without_shared_parts({"tied": peaks}) == {"tied": peaks}
