import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.actors.lifecycle import cpu_affinity as cores
from windlass.actors.lifecycle.cpu_affinity import (
    TooFewCoresError,
    bind_optimizer,
    cores_of,
    numa_nodes,
)

TWO_NODES = [frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})]


def test_nodes_have_only_cores_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in ((10, "8-9"), (2, "2-3"), (0, "0-1")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {1, 8, 9})
    assert numa_nodes(tmp_path) == [{1}, {8, 9}]


def test_system_without_numa_information_has_one_node(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == [os.sched_getaffinity(0)]


def test_each_optimizer_has_a_node() -> None:
    assert [cores_of(i, 2, TWO_NODES) for i in range(2)] == TWO_NODES


def test_one_nodes_optimizers_share_its_cores() -> None:
    sets = [cores_of(i, 3, TWO_NODES) for i in range(3)]
    assert sets == [{0, 1}, {4, 5, 6, 7}, {2, 3}]


def test_more_optimizers_than_cores_run_on_the_same_ones() -> None:
    assert [cores_of(i, 3, [frozenset({0, 1})]) for i in range(3)] == [{0, 1}, {0}, {1}]


def test_a_process_is_bound() -> None:
    code = (
        "import os; from windlass.actors.lifecycle.cpu_affinity import bind_optimizer, cores_of, numa_nodes; "
        "expected = cores_of(1, 2, numa_nodes()); bind_optimizer(1, 2, 1); "
        "assert os.sched_getaffinity(0) == expected, os.sched_getaffinity(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_threads_than_cores_are_refused() -> None:
    num_cores = len(os.sched_getaffinity(0))
    with pytest.raises(TooFewCoresError, match=f"is to run {num_cores + 1} threads; lower optimizer_threads"):
        bind_optimizer(0, 1, num_cores + 1)
