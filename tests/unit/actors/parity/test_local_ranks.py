"""All actors in one process, with several GPU workers: the same losses and params to the bit as with one."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.actors.parity.test_local_groups import PLACES, Run, grouped, train
from tests.unit.actors.parity.test_local_lanes import job
from windlass.storage.ids import Precision

NUM_MICROBATCHES = 4


def run(root: Path, num_ranks: int, group_size: int | None = None, **changes: Any) -> Run:
    spec = grouped(job(root, **({"lanes": 1} | changes), num_ranks=num_ranks), group_size)
    train(spec)
    return Run.of(spec)


@pytest.mark.parametrize("num_ranks", [2])
def test_ranks_change_no_bit(tmp_path: Path, num_ranks: int) -> None:
    changes: dict[str, Any] = {"precision": Precision.FP32, "placement": PLACES["SSDs"]}
    one = run(tmp_path / "one", 1, **changes)
    run(tmp_path / "several", num_ranks, **changes).assert_equals(one)
