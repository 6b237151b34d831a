"""The mixed-bandwidth measurement, on real files."""

from pathlib import Path

import pytest

from benchmarks.ssd.mix import MIB, DirectIoError, MixFiles, MixSetting, mixed_bytes_per_s

SETTING = MixSetting(num_threads=4, block_nbytes=MIB)


def test_bytes_move_and_nothing_is_left(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    try:
        files = MixFiles(directories, 8 * MIB).__enter__()
    except DirectIoError as error:
        pytest.skip(str(error))
    try:
        sizes = [(directory / "mix.bin").stat().st_size for directory in directories]
        # On a busy machine no transfer may end within the shorter times.
        assert any(mixed_bytes_per_s(files, SETTING, 0.5, seconds) > 0 for seconds in (0.1, 1.0, 10.0))
    finally:
        files.__exit__()
    assert sizes == [8 * MIB, 8 * MIB]
    assert not any((directory / "mix.bin").exists() for directory in directories)


def test_a_transfer_that_fails_is_an_error(tmp_path: Path) -> None:
    try:
        with MixFiles([tmp_path], 2 * MIB) as files:
            impossible = MixSetting(num_threads=1, block_nbytes=1000)  # O_DIRECT needs whole sectors
            with pytest.raises(OSError, match="Invalid argument"):
                mixed_bytes_per_s(files, impossible, 0.5, 0.05)
    except DirectIoError as error:
        pytest.skip(str(error))
