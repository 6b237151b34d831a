"""Threads that OpenMP keeps alive."""

import concurrent.futures
from pathlib import Path

import pytest
import torch

from windlass.engine.device import openmp
from windlass.engine.device.openmp import release_team

_NUMEL = 1 << 20


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="torch computes without OpenMP")
def test_openmp_team_is_ended_and_starts_again() -> None:
    def run() -> tuple[int, int, int]:
        torch.set_num_threads(3)
        before = num_threads()
        values = torch.ones(_NUMEL).add_(1)
        with_team = num_threads()
        release_team()
        without = num_threads()
        values.add_(1)
        assert torch.equal(values, torch.full((_NUMEL,), 3.0))
        assert torch.get_num_threads() == 3
        assert num_threads() == with_team
        return before, with_team, without

    num = torch.get_num_threads()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as fresh_thread:
            before, with_team, without = fresh_thread.submit(run).result()
    finally:
        torch.set_num_threads(num)
    assert with_team == before + 2
    assert without == before


def test_end_of_team_without_openmp_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "7f00-7f01 r-xp 00000000 00:00 0  /usr/lib/libc.so.6\n")
    openmp._pause.cache_clear()
    try:
        release_team()
    finally:
        openmp._pause.cache_clear()
