from pathlib import Path

from windlass.actors.job.errors import append_error, last_error
from windlass.storage.ids import Attempt


def test_errors_of_all_attempts_stay_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    append_error(tmp_path, Attempt(1), "gpu-0\nTraceback\n")
    append_error(tmp_path, Attempt(2), "ssd-0 did not stop within 60 s")
    expected = "attempt 1: gpu-0\nTraceback\nattempt 2: ssd-0 did not stop within 60 s\n"
    assert (tmp_path / "error.txt").read_text() == expected


def test_error_that_cannot_be_written_raises_nothing(tmp_path: Path) -> None:
    append_error(tmp_path / "missing", Attempt(1), "gpu-0\nTraceback")
    assert list(tmp_path.iterdir()) == []


def test_last_line_of_the_last_error_of_an_attempt_is_found(tmp_path: Path) -> None:
    assert last_error(tmp_path, Attempt(1)) is None
    append_error(tmp_path, Attempt(1), "Traceback\n  line\nValueError: the first")
    append_error(tmp_path, Attempt(1), "Traceback\nwindlass.actors.x.LostError: v1.2: the second\n")
    append_error(tmp_path, Attempt(2), "OSError: of another attempt")
    assert last_error(tmp_path, Attempt(1)) == "LostError: v1.2: the second", "the module says nothing to users"
    assert last_error(tmp_path, Attempt(2)) == "OSError: of another attempt"
    assert last_error(tmp_path, Attempt(3)) is None
