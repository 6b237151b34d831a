"""Fixtures of the integration tests: homes, job stages on real Ray, and loop devices, which act as block devices."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.resume_stage import ResumeStage, Undisturbed, resume_stage
from tests.support.disk_images import IMAGE_NBYTES
from tests.support.training import has_direct_io

MakeLoop = Callable[..., Path]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)


def require(what: str, *command: str | Path) -> str:
    """Runs a command; skips the test with its error output if the machine does not allow it."""
    try:
        done = run(*command)
    except FileNotFoundError:
        pytest.skip(f"{what}: {command[0]} is not installed")
    if done.returncode != 0:
        pytest.skip(f"{what}: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture(scope="module")
def direct_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder on a file system that supports O_DIRECT, which SSD servers need."""
    return _make_direct_home(tmp_path_factory)


@pytest.fixture(scope="package")
def shared_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResumeStage]:
    """One stage for all modules, because starting Ray takes longer than a job."""
    with resume_stage(_make_direct_home(tmp_path_factory)) as stage:
        yield stage


@pytest.fixture(scope="module")
def stage(shared_stage: ResumeStage) -> ResumeStage:
    """The stage on which the tests of a module run their jobs."""
    return shared_stage


@pytest.fixture(scope="package")
def undisturbed(shared_stage: ResumeStage) -> Undisturbed:
    """The losses and the model that every job of `NUM_STEPS` steps must produce, on any stage."""
    return shared_stage.train_undisturbed()


def _make_direct_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    if not has_direct_io(home):
        pytest.skip(f"the file system of {home} refuses O_DIRECT, which SSD servers need")
    return home


@pytest.fixture
def make_loop(tmp_path: Path) -> Iterator[MakeLoop]:
    """Makes loop devices, each on a sparse file `disk-N`, and detaches them at the end."""
    made: list[Path] = []

    def make(*options: str, nbytes: int = IMAGE_NBYTES) -> Path:
        image = tmp_path / f"disk-{len(made)}"
        with image.open("wb") as file:
            file.truncate(nbytes)
        made.append(Path(require("no loop devices here", "losetup", "--find", "--show", *options, image)))
        return made[-1]

    yield make
    failed = [done.stderr for device in made if (done := run("losetup", "--detach", device)).returncode != 0]
    assert failed == []
