"""Locks on files, which exclude descriptors and processes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.storage.files.locks import lock, locked, open_lock_file, try_lock, unlock


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two descriptors of one file."""
    fds = open_lock_file(tmp_path / "lock"), open_lock_file(tmp_path / "lock")
    yield fds
    for fd in fds:
        os.close(fd)


def test_a_lock_excludes_others_until_it_is_released(two: tuple[int, int]) -> None:
    first, second = two
    assert try_lock(first)
    assert not try_lock(second)
    unlock(first)
    assert try_lock(second)


def test_shared_locks_exclude_only_exclusive_ones(two: tuple[int, int]) -> None:
    first, second = two
    lock(first, shared=True)
    lock(second, shared=True)
    assert not try_lock(first), "the other one is shared still"
    unlock(second)
    assert try_lock(first)


def test_the_wait_for_a_lock_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, timeout_s=0.0), pytest.raises(TimeoutError, match="held"), locked(path, timeout_s=0.1):
        pass
    with locked(path, timeout_s=0.0):
        pass


def test_a_lock_file_is_its_owners(tmp_path: Path) -> None:
    os.close(open_lock_file(tmp_path / "lock"))
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
