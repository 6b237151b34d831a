"""The resources of the machine that jobs may use."""

import itertools
import os
from pathlib import Path

import pytest

from windlass.service.installation.machine import find_gpus, inspect_machine, mount_point
from windlass.service.jobs.machine_resources import MachineResources


@pytest.fixture
def gpu_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the driver's tool: prints a line for each GPU, and records its arguments."""
    tool = tmp_path / "nvidia-smi"
    lines = "NVIDIA RTX 4090, 24564, 570.1\nRTX 3090, 24576, 570.1\n"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\nprintf "{lines}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tool


def test_gpus_are_what_the_driver_lists(gpu_tool: Path) -> None:
    first, second = find_gpus()
    assert (first.name, first.memory_nbytes, first.driver_version) == ("NVIDIA RTX 4090", 24564 * 1024**2, "570.1")
    assert second.name == "RTX 3090"


def test_hidden_gpus_do_not_count(gpu_tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    find_gpus()
    assert "--id=1" in (gpu_tool.parent / "called").read_text()


def test_a_tool_without_a_driver_means_no_gpu(gpu_tool: Path) -> None:
    gpu_tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert find_gpus() == ()


def test_room_is_that_of_the_file_system_a_path_will_lie_on(tmp_path: Path) -> None:
    machine = inspect_machine((tmp_path, tmp_path / "not" / "there yet"))
    assert machine.num_cores == len(os.sched_getaffinity(0))
    assert machine.spaces[0].total_nbytes == machine.spaces[1].total_nbytes > 0


def test_mount_point_is_that_of_the_disk_that_will_hold_a_path() -> None:
    assert mount_point(Path("/proc/not/there")) == Path("/proc")
    assert mount_point(Path("/not/there")) == Path("/")


def test_a_drive_that_is_missing_is_told_from_one_that_is_there(tmp_path: Path) -> None:
    (missing,) = inspect_machine((), (tmp_path / "nvme9n1",)).drives
    assert (missing.nbytes, missing.may_be_used) == (None, False)


def test_a_drive_has_the_size_that_the_kernel_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [
        path for path in sorted(Path("/sys/class/block").glob("*/size")) if Path("/dev", path.parent.name).exists()
    ]
    if not sizes:
        pytest.skip("this machine shows no block device")
    device = Path("/dev", sizes[-1].parent.name)
    for may_be_used in (True, False):
        monkeypatch.setattr("os.access", lambda path, mode, answer=may_be_used: answer)
        (drive,) = inspect_machine((), (device,)).drives
        assert (drive.path, drive.may_be_used) == (device, may_be_used)
        assert drive.nbytes == int(sizes[-1].read_text()) * 512


@pytest.mark.parametrize(
    ("num_cores", "num_gpus", "expected"),
    [
        (1, 0, (1, 1)),
        (2, 0, (2, 1)),
        (7, 0, (7, 1)),
        (8, 0, (7, 1)),
        (16, 0, (14, 2)),
        (2, 1, (1, 1)),
        (4, 1, (2, 1)),
        (16, 1, (2, 13)),
        (64, 4, (2, 13)),
        (4, 4, (1, 1)),
    ],
)
def test_threads_of_a_job(num_cores: int, num_gpus: int, expected: tuple[int, int]) -> None:
    resources = MachineResources(num_cores=num_cores, num_gpus=num_gpus)
    assert resources.num_devices == max(1, num_gpus)
    assert resources.threads(1) == expected


@pytest.mark.parametrize(
    ("num_cores", "num_gpus", "cpu_ranks", "num_ranks", "expected"),
    [
        (2, 0, 2, 2, (1, 1)),
        (7, 0, 2, 2, (3, 1)),
        (16, 0, 4, 2, (4, 1)),
        (16, 0, 4, 4, (4, 2)),
        (64, 0, 4, 1, (14, 2)),
        (64, 0, 4, 4, (14, 8)),
        (1, 0, 4, 4, (1, 1)),
        (64, 4, 1, 4, (2, 54)),
        (64, 4, 1, 2, (2, 26)),
        (4, 4, 1, 4, (1, 1)),
    ],
)
def test_threads_of_a_job_on_several_devices(
    num_cores: int, num_gpus: int, cpu_ranks: int, num_ranks: int, expected: tuple[int, int]
) -> None:
    resources = MachineResources(num_cores=num_cores, num_gpus=num_gpus, cpu_ranks=cpu_ranks)
    assert resources.num_devices == (num_gpus or cpu_ranks)
    assert resources.threads(1, num_ranks=num_ranks) == expected


@pytest.mark.parametrize("num_optimizers", [1, 2])
@pytest.mark.parametrize(("compute", "each"), [(None, None), (3, None), (None, 2)])
def test_threads_that_compute_on_a_cpu_are_the_same_whatever_the_devices_of_a_job(
    num_optimizers: int, compute: int | None, each: int | None
) -> None:
    """Sums over examples have other bits with other numbers of threads."""
    for num_cores, cpu_ranks in itertools.product(range(1, 65), range(1, 9)):
        resources = MachineResources(num_cores=num_cores, num_gpus=0, cpu_ranks=cpu_ranks)
        numbers = range(1, cpu_ranks + 1)
        threads = [resources.threads(num_optimizers, compute, each, num_ranks=number) for number in numbers]
        assert len({of_each_rank for of_each_rank, _ in threads}) == 1
        if num_cores // cpu_ranks >= 8:
            assert cpu_ranks * threads[-1][0] + num_optimizers * threads[-1][1] <= num_cores


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 4])
@pytest.mark.parametrize("num_optimizers", [1, 2, 4])
@pytest.mark.parametrize(("compute", "each"), [(None, None), (3, None), (None, 1), (4, 1)])
def test_all_jobs_together_have_no_more_threads_than_cores(
    num_gpus: int, num_optimizers: int, compute: int | None, each: int | None
) -> None:
    for num_cores in range(8 * max(1, num_gpus), 129):
        resources = MachineResources(num_cores=num_cores, num_gpus=num_gpus)
        asked = (compute, each)
        threads = resources.threads(num_optimizers, *asked)
        assert (threads[0] + num_optimizers * threads[1]) * resources.num_devices <= num_cores
        assert min(threads) >= 1
        assert all(want in (None, found) for want, found in zip(asked, threads, strict=True))
