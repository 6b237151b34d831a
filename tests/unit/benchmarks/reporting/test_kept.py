"""Results that a long benchmark keeps for its next run."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.reporting import kept
from benchmarks.reporting.kept import KeptResults, tree_digest


def test_kept_results_of_the_same_form_and_code_are_not_measured_again(tmp_path: Path) -> None:
    assert KeptResults.in_folder(tmp_path, form="quick").of("a part", lambda: 1) == 1
    assert KeptResults.in_folder(tmp_path, form="quick").of("a part", lambda: 2) == 1
    assert KeptResults.in_folder(tmp_path, form="quick").of("another part", lambda: 2) == 2


def test_kept_results_of_another_form_or_other_code_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeptResults.in_folder(tmp_path, form="quick").of("a part", lambda: 1)
    assert KeptResults.in_folder(tmp_path, form="full").of("a part", lambda: 2) == 2
    monkeypatch.setattr(kept, "tree_digest", lambda **_: "of other code")
    assert KeptResults.in_folder(tmp_path, form="quick").of("a part", lambda: 3) == 3


def test_kept_results_without_a_folder_are_always_measured() -> None:
    results = KeptResults.in_folder(None, form="quick")
    assert [results.of("a part", lambda: 1), results.of("a part", lambda: 2)] == [1, 2]


def test_tree_digest_changes_with_commits_and_with_what_is_not_committed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, capture_output=True, check=True)

    def commit() -> str:
        git("add", ".")
        git("commit", "--message", "a change")
        return tree_digest(tmp_path)

    git("init")
    file = tmp_path / "file"
    file.write_text("one")
    first = commit()
    file.write_text("two")
    changed = tree_digest(tmp_path)
    assert len({first, changed, second := commit()}) == 3
    assert tree_digest(tmp_path, without=["file"]) != second
    beside = tree_digest(tmp_path, without=["text"])
    (tmp_path / "text").write_text("not code")
    commit()
    (tmp_path / "text").write_text("still not code")
    assert tree_digest(tmp_path, without=["text"]) == beside
