"""Results by key in a folder, which may be lost at any time."""

import os
from pathlib import Path

import pytest

from windlass.storage.files.result_cache import ResultCache


def cache(folder: Path, max_results: int = 8) -> ResultCache:
    return ResultCache(folder=folder / "cache", max_results=max_results)


def test_a_result_is_found_by_its_key_only(tmp_path: Path) -> None:
    cache(tmp_path).keep("a", {"x": 1})
    assert cache(tmp_path).find("a") == {"x": 1}
    assert cache(tmp_path).find("b") is None
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["a.json"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", ["", "{", "[1]", "3"])
def test_what_is_no_result_is_none(tmp_path: Path, content: str) -> None:
    cache(tmp_path).keep("a", {})
    (tmp_path / "cache" / "a.json").write_text(content)
    assert cache(tmp_path).find("a") is None


def test_the_oldest_results_go(tmp_path: Path) -> None:
    for number in range(4):
        cache(tmp_path, max_results=2).keep(str(number), {"number": number})
        os.utime(tmp_path / "cache" / f"{number}.json", ns=(number, number))
    assert [number for number in range(4) if cache(tmp_path).find(str(number))] == [2, 3]


def test_a_result_that_cannot_be_stored_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    cache(tmp_path).keep("a", {"x": 1})
    assert cache(tmp_path).find("a") is None
