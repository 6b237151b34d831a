"""The doctor: measurements become a profile, and problems get a remedy."""

import resource
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass.service.installation.machine import Gpu, Machine, Space
from windlass.service.installation.settings import load_settings
from windlass.service.machine import doctor
from windlass.service.machine.doctor import DoctorError, SsdMeasurement, check_limits, hardware_of
from windlass.storage.ids import Precision
from windlass.storage.io.engines import DEFAULT_IO
from windlass.storage.ssd.calibration import Calibration

GIB = 2**30

RATES = {
    "device": "CPU",
    "num_devices": 0,
    "device_nbytes": None,
    "flops": 1.23456e12,
    "fp32_flops": 0.345678e12,
    "h2d_bytes": 10e9,
    "d2h_bytes": 11e9,
    "duplex_bytes": 15e9,
    "memory_bytes": 40e9,
    "adam_params": 2e9,
}


def measurement(disk: int, *, read: float, free_gib: float) -> SsdMeasurement:
    calibration = Calibration(
        io=DEFAULT_IO,
        read_bytes_per_s=read,
        write_bytes_per_s=read / 2,
        mixed_bytes_per_s=read * 3 / 4,
        cpu_s_per_byte=6e-11,
        measured_at="2026-01-31",
    )
    return SsdMeasurement(path=Path(f"/ssd{disk}"), disk=disk, free_nbytes=int(free_gib * GIB), calibration=calibration)


def machine(*, shm_gib: float = 12, memory_gib: float = 16, available_gib: float = 0) -> Machine:
    return Machine(
        num_cores=2,
        memory_nbytes=int(memory_gib * GIB),
        available_memory_nbytes=int(available_gib * GIB),
        gpus=(),
        spaces=(Space(path=Path("/dev/shm"), total_nbytes=int(shm_gib * GIB), free_nbytes=0),),
        drives=(),
    )


def test_rates_become_a_profile() -> None:
    ssds = [measurement(1, read=6e9, free_gib=100), measurement(2, read=4e9, free_gib=300)]
    hardware = hardware_of(RATES, memory_nbytes=8 * GIB, ssds=ssds)
    assert (hardware.gpus.count, hardware.gpus.memory_gib, hardware.gpus.tflops) == (0, 8.0, 1.235)
    assert hardware.gpus.fp32_tflops == 0.3457
    assert hardware.host.memory_gib == 8.0
    assert hardware.ssds.model_dump() == {
        "count": 2,
        "read_gb_per_s": 4.0,
        "write_gb_per_s": 2.0,
        "capacity_gib": 100.0,
        "combined_gb_per_s": 7.5,
        "cpu_s_per_gb": 0.06,
    }


def test_directories_on_one_disk_share_it() -> None:
    ssds = [measurement(1, read=6e9, free_gib=100)] * 2
    gpu = {"device_nbytes": 24 * GIB, "num_devices": 1, "fp32_flops": None}
    found = hardware_of(RATES | gpu, memory_nbytes=8 * GIB, ssds=ssds)
    assert (found.ssds.count, found.ssds.read_gb_per_s, found.ssds.capacity_gib) == (2, 3.0, 50.0)
    assert found.ssds.combined_gb_per_s == 4.5
    assert (found.gpus.count, found.gpus.memory_gib, found.gpus.fp32_tflops) == (1, 24, None)


@pytest.mark.parametrize(("num_devices", "duplex"), [(0, None), (1, 15.0)])
def test_gpu_bandwidth_of_both_directions_at_once_is_reported(num_devices: int, duplex: float | None) -> None:
    rates = RATES | {"num_devices": num_devices}
    found = hardware_of(rates, memory_nbytes=8 * GIB, ssds=[measurement(1, read=6e9, free_gib=100)])
    assert found.pcie.duplex_gb_per_s == duplex


@pytest.mark.parametrize(("together", "combined"), [(5e9, 5.0), (9e9, 7.5)])
def test_ssds_that_slow_each_other_down_have_a_limit(together: float, combined: float) -> None:
    ssds = [measurement(1, read=6e9, free_gib=100), measurement(2, read=4e9, free_gib=300)]
    found = hardware_of(RATES, memory_nbytes=8 * GIB, ssds=ssds, together_bytes_per_s=together)
    assert found.ssds.combined_gb_per_s == combined


def test_several_disks_are_measured_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_SSD_DIRS", ",".join(str(tmp_path / name) for name in "abc"))
    disks = {"a": 1, "b": 2, "c": 2}
    monkeypatch.setattr(
        doctor,
        "_measure_ssd",
        lambda path, _: replace(measurement(disks[path.name], read=4e9, free_gib=9), path=path),
    )
    monkeypatch.setattr(doctor, "_rates", lambda *_: RATES)
    asked: list[list[str]] = []

    def together(paths: list[Path]) -> float:
        asked.append([path.name for path in paths])
        return 4e9

    monkeypatch.setattr(doctor, "bytes_per_s_together", together)
    found = doctor.measure_hardware(load_settings(tmp_path / "home"), tell=lambda _: None)
    assert asked == [["a", "c"]]
    assert found.ssds.combined_gb_per_s == 4.0


def test_full_disk_is_named_and_makes_no_profile() -> None:
    with pytest.raises(DoctorError, match="nothing is free on /ssd1; delete"):
        hardware_of(RATES, memory_nbytes=GIB, ssds=[measurement(1, read=6e9, free_gib=0)])
    with pytest.raises(DoctorError, match="no memory is free"):
        hardware_of(RATES, memory_nbytes=0, ssds=[measurement(1, read=6e9, free_gib=1)])


def test_directories_on_one_disk_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrations = iter(range(1, 3))

    def calibrate(*_: Any) -> Calibration:
        return measurement(1, read=1e9 * next(calibrations), free_gib=1).calibration

    monkeypatch.setattr("windlass.actors.job.admission.calibrate", calibrate)
    monkeypatch.setattr(doctor, "_rates", lambda *_: RATES)
    found = doctor.measure_hardware(load_settings(tmp_path / "home"), tell=lambda _: None)
    assert found.ssds.count == 2
    assert found.ssds.read_gb_per_s == 0.5
    assert next(calibrations) == 2


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_SSD_DIRS", "/proc/windlass/ssd")
    monkeypatch.setattr(doctor, "_rates", lambda *_: RATES)
    with pytest.raises(DoctorError, match="/proc/windlass/ssd could not be measured"):
        doctor.measure_hardware(load_settings(tmp_path / "home"), tell=lambda _: None)


def remedies(of: Machine) -> dict[str, str | None]:
    return {finding.what: finding.remedy for finding in check_limits(of)}


def test_small_shared_memory_has_a_remedy() -> None:
    assert remedies(machine(shm_gib=12))["shared memory"] is None
    assert "remount" in str(remedies(machine(shm_gib=11))["shared memory"])


def test_a_limit_of_the_control_group_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_available_nbytes", lambda: 4 * GIB)
    assert remedies(machine(available_gib=4))["memory that jobs may take"] is None
    assert "control group" in str(remedies(machine(available_gib=8))["memory that jobs may take"])


def test_a_gpu_that_pytorch_cannot_use_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "PyTorch" not in remedies(machine())
    with_gpu = replace(machine(), gpus=(Gpu(name="NVIDIA A", memory_nbytes=1, driver_version="1"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "install a PyTorch for this driver" in str(remedies(with_gpu)["PyTorch"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert remedies(with_gpu)["PyTorch"] is None


def test_few_descriptors_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (1024, 1 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    assert "ulimit -n" in str(remedies(machine())["open files"])
    limits = (1024, 2048)
    assert "administrator" in str(remedies(machine())["open files"])
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert remedies(machine())["open files"] is None
    limits = (4096, 4096)
    assert remedies(machine())["open files"] is None


@pytest.mark.parametrize(
    ("release", "limits", "found", "remedy"),
    [
        ("6.1.0-13-amd64", (64 << 10, 64 << 10), "0.0625 MiB; jobs need none of it on this kernel", None),
        ("5.10.0-28", (64 << 10, 64 << 20), "0.0625 MiB", "`ulimit -l 1024`"),
        ("5.4.0", (64 << 10, 64 << 10), "0.0625 MiB", "administrator"),
        ("5.4.0", (8 << 20, 8 << 20), "8 MiB", None),
        ("5.4.0", (resource.RLIM_INFINITY,) * 2, "any amount", None),
    ],
)
def test_locked_memory_has_a_remedy_where_rings_of_io_uring_count(
    monkeypatch: pytest.MonkeyPatch, release: str, limits: tuple[int, int], found: str, remedy: str | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(release=release))
    (finding,) = (each for each in check_limits(machine()) if each.what == "locked memory")
    assert finding.found == found
    assert (finding.remedy is None) == (remedy is None)
    assert (remedy or "") in (finding.remedy or "")


def test_the_device_is_measured_in_the_precision_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def note(command: list[str], **_: Any) -> Any:
        asked.append(command)
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", note)
    told: list[str] = []
    with pytest.raises(DoctorError, match="could not be measured within"):
        doctor.measure_hardware(load_settings(tmp_path), told.append, precision=Precision.FP16)
    assert asked[0][-2:] == ["--precision", "fp16"]
    assert "(in fp16)" in told[0]


def test_a_device_that_cannot_be_measured_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        return type("Result", (), {"returncode": 1, "stderr": "Traceback\nRuntimeError: no driver\n", "stdout": ""})

    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(DoctorError, match="RuntimeError: no driver"):
        doctor.measure_hardware(load_settings(tmp_path), tell=lambda _: None)


@pytest.mark.parametrize(
    ("options", "enabled", "release", "found", "remedy"),
    [
        ("rw,size=9k", "[never] deny force", "6.1.0-13-amd64", "/dev/shm has huge=never; jobs make them", None),
        ("rw,size=9k", "[never] deny force", "5.15.0", "/dev/shm has huge=never", "remount,huge=within_size /dev/shm"),
        ("rw,huge=advise", "[never] deny force", "5.15.0", "/dev/shm has huge=advise", None),
        ("rw,huge=advise", "[never] deny force", "5.10.0", "/dev/shm has huge=advise", "huge=within_size"),
        ("rw,huge=within_size,size=9k", "[never] deny force", "5.10.0", "/dev/shm has huge=within_size", None),
        ("rw,huge=always", "never [deny] force", "6.1.0", "denied to shared memory", "echo never"),
        ("rw", "never deny [force]", "5.10.0", "/dev/shm has huge=never", None),
        ("rw", None, "5.10.0", "/dev/shm has huge=never", "huge=within_size"),
    ],
)
def test_shared_memory_without_huge_pages_has_a_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    enabled: str | None,
    release: str,
    found: str,
    remedy: str | None,
) -> None:
    mounts, shmem_enabled = tmp_path / "mounts", tmp_path / "shmem_enabled"
    mounts.write_text(f"tmpfs /tmp tmpfs rw,huge=always 0 0\ntmpfs /dev/shm tmpfs {options} 0 0\n")
    if enabled is not None:
        shmem_enabled.write_text(f"always within_size advise {enabled}\n")
    monkeypatch.setattr(doctor, "_MOUNTS", mounts)
    monkeypatch.setattr(doctor, "_SHMEM_ENABLED", shmem_enabled)
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(release=release))
    (finding,) = (each for each in check_limits(machine()) if each.what == "huge pages")
    assert finding.found == found
    assert (finding.remedy is None) == (remedy is None)
    assert (remedy or "") in (finding.remedy or "")
