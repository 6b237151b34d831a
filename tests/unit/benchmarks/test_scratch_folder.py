"""Folders of benchmarks go at their end, and those of killed benchmarks when the next one begins."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scratch_folder as module
from benchmarks.scratch_folder import scratch_folder

ROOT = Path(module.__file__).parents[1]
# Writes a file into its folder, names the folder, and waits to be killed.
BENCHMARK = """
import sys
from pathlib import Path
from benchmarks.scratch_folder import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "states").mkdir()
    (folder / "states" / "states.bin").write_bytes(bytes(4096))
    print(folder, flush=True)
    sys.stdin.read()
"""


def running_benchmark(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    """Starts a process with a folder in `parent`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-c", BENCHMARK, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_named_by_its_process_and_goes_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with scratch_folder(Path()) as folder:
        assert folder.is_absolute()
        assert folder.parent == tmp_path.resolve()
        assert re.fullmatch(rf"\.bench-{os.getpid()}-\w+", folder.name)
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "states.bin").write_bytes(b"1")
    with pytest.raises(KeyError), scratch_folder(tmp_path) as folder:
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_without_a_parent_it_is_among_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as folder:
        assert folder.parent == tmp_path.resolve()


def test_what_a_killed_benchmark_left_goes_when_the_next_begins(tmp_path: Path) -> None:
    kept = [tmp_path / ".bench-of-a-person", tmp_path / "bench-1-a", tmp_path / ".bench-1-file"]
    for folder in kept[:2]:
        folder.mkdir()
    kept[2].write_text("no folder")
    process, left = running_benchmark(tmp_path)
    with process:
        with scratch_folder(tmp_path):
            assert (left / "states" / "states.bin").exists()  # its process lives
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert left.exists()
        with scratch_folder(tmp_path) as folder:
            assert sorted(tmp_path.iterdir()) == sorted([*kept, folder])


def test_folders_of_one_process_are_used_side_by_side(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        assert first.exists()
        assert first != second


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, made = module.lock, []

    def late(file: Any) -> None:
        made.append(Path(f"/proc/self/fd/{file}").readlink())
        if len(made) == 1:
            module.remove_leftovers(tmp_path)
        lock(file)

    monkeypatch.setattr(module, "lock", late)
    with scratch_folder(tmp_path) as folder:
        assert len(made) == 2
        assert folder == made[1]
        assert list(tmp_path.iterdir()) == [folder]
