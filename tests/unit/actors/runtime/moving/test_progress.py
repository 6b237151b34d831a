"""The progress of a move, in messages and in a file."""

from pathlib import Path

from windlass.actors.runtime.moving.progress import MoveProgress, progress_of_move
from windlass.storage.ids import Attempt


def test_messages_say_first_what_moves_and_then_how_far_it_is_each_half_minute(tmp_path: Path) -> None:
    progress = MoveProgress(tmp_path, Attempt(2), "1 GiB of 3 blocks from a to b", 2 << 30)
    assert progress.text(0, 100.0) == "Moving 1 GiB of 3 blocks from a to b"
    assert progress.text(5, 129.0) is None
    assert progress.text(1 << 30, 131.0) == "Moved 1.00 GiB of 2.00 GiB"
    assert MoveProgress(tmp_path, Attempt(2), "", 1).text(0, 0.0) == "Moving its states to other SSDs of its boxes"


def test_file_says_how_far_the_attempt_is_and_nothing_of_other_attempts(tmp_path: Path) -> None:
    assert progress_of_move(tmp_path, Attempt(2)) is None
    progress = MoveProgress(tmp_path, Attempt(2), "", 100)
    progress.note(10)
    progress.note(20)
    assert progress_of_move(tmp_path, Attempt(2)) == (20, 100)
    assert progress_of_move(tmp_path, Attempt(3)) is None
    for text in ("", "[]", '{"attempt": 2}'):
        (tmp_path / "moving.json").write_text(text)
        assert progress_of_move(tmp_path, Attempt(2)) is None
    MoveProgress(tmp_path / "gone", Attempt(2), "", 100).note(10)
