"""Conditions under which `windlass up` measures the machine, or keeps the profile."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.yaml_files import load
from windlass.service.installation.machine import Gpu
from windlass.service.installation.settings import HARDWARE_FILE, Settings, load_settings
from windlass.service.machine.doctor import DoctorError
from windlass.service.machine.ray_cluster import RayCluster
from windlass.service.processes import machine_profile as measured_machine
from windlass.service.processes import shutdown as lifecycle
from windlass.service.processes.machine_profile import ensure_measured, measure_and_save
from windlass.storage.ids import Precision

PROFILE = load(Hardware, example_machines()["memascend-2"])


class Bench:
    """A home, and a stand-in for the measurement."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        self.home = home
        self.settings = load_settings(home)
        self.num_measured = 0
        self.precision: Precision | None = None
        self.told: list[str] = []
        self.failure: Exception | None = None
        self.profile = PROFILE

    @property
    def path(self) -> Path:
        return self.home / HARDWARE_FILE

    def measure(self, _: Settings, tell: Any, precision: Precision) -> Hardware:
        self.precision = precision
        self.num_measured += 1
        if self.failure is not None:
            raise self.failure
        tell("measuring this and that")
        return self.profile

    def up(self) -> str:
        """The messages of a start."""
        self.told.clear()
        ensure_measured(self.settings, self.told.append)
        return "\n".join(self.told)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(tmp_path / "home")
    monkeypatch.setattr(measured_machine, "measure_hardware", bench.measure)
    monkeypatch.setattr(measured_machine, "find_gpus", lambda: (GPU,))
    return bench


GPU = Gpu(name="A5000", memory_nbytes=24 << 30, driver_version="1")


def test_the_profile_says_in_which_precision_it_was_measured(bench: Bench) -> None:
    measure_and_save(bench.settings, bench.path, bench.told.append, precision=Precision.FP32)
    assert bench.precision is Precision.FP32
    assert bench.path.read_text().startswith("# Measured by `windlass doctor`; gpus.tflops in fp32.\n")
    assert load(Hardware, bench.path) == PROFILE


def test_a_machine_is_measured_once(bench: Bench) -> None:
    told = bench.up()
    assert "was not measured yet" in told
    assert "--no-measure" in told
    assert f"saved as {bench.path}" in told
    assert load(Hardware, bench.path) == PROFILE
    assert bench.up() == ""
    assert bench.num_measured == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gpus": ()}, "GPUs none, not A5000, 24.0 GiB"),
        ({"gpus": (GPU, GPU)}, "GPUs A5000, 24.0 GiB, A5000, 24.0 GiB, not"),
        ({"cores": 4096}, "4096 cores, not"),
        ({"memory_nbytes": 1 << 50}, "1048576.0 GiB of memory, not"),
    ],
)
def test_another_machine_is_measured_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    bench.up()
    if "gpus" in changed:
        monkeypatch.setattr(measured_machine, "find_gpus", lambda: changed["gpus"])
    if "cores" in changed:
        monkeypatch.setattr(measured_machine, "num_cores", lambda: changed["cores"])
    if "memory_nbytes" in changed:
        memory = type("Memory", (), {"total": changed["memory_nbytes"]})
        monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    told = bench.up()
    assert "has changed since it was measured" in told
    assert words in told
    assert bench.num_measured == 2
    assert bench.up() == ""


def test_other_ssds_are_measured_again(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.up()
    monkeypatch.setenv("WINDLASS_SSD_DIRS", str(tmp_path / "other"))
    bench.settings = load_settings(bench.home)
    assert f"ssd_dirs {tmp_path / 'other'}, not {bench.home / 'ssd0'}, {bench.home / 'ssd1'}" in bench.up()
    assert bench.num_measured == 2


def test_a_machine_that_has_changed_is_measured_in_the_precision_that_was_asked_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_and_save(bench.settings, bench.path, bench.told.append, precision=Precision.FP16)
    bench.precision = None
    monkeypatch.setattr(measured_machine, "num_cores", lambda: 4096)
    bench.up()
    assert bench.precision is Precision.FP16
    assert "in fp16" in bench.path.read_text()


def test_cpu_whose_profile_has_no_rate_in_fp32_is_measured_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in fp32 were planned by the rate in bf16, four times as fast."""
    monkeypatch.setattr(measured_machine, "find_gpus", lambda: ())
    bench.profile = with_part(PROFILE, gpus=with_part(PROFILE.gpus, count=0, fp32_tflops=None))
    bench.up()
    bench.profile = with_part(PROFILE, gpus=with_part(PROFILE.gpus, count=0, fp32_tflops=0.2))
    assert "no rate in fp32" in bench.up()
    assert (bench.up(), bench.num_measured) == ("", 2)


def test_profile_measured_by_doctor_is_used(bench: Bench) -> None:
    measure_and_save(bench.settings, bench.path, bench.told.append)
    assert bench.up() == ""
    assert bench.num_measured == 1


def test_profile_written_by_user_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    own = PROFILE.model_dump(exclude_none=True)
    bench.path.write_text(yaml.safe_dump(own))
    assert bench.up() == ""  # as many GPUs and SSDs as this machine has
    own["ssds"]["count"] = 5
    bench.path.write_text(yaml.safe_dump(own))
    assert f"{bench.path}: ssds.count: 5, but there are 2 here" in bench.up()
    assert yaml.safe_load(bench.path.read_text()) == own
    # Measured, edited by the user, and then the machine changes: the edited profile stays.
    bench.path.unlink()
    bench.up()
    bench.path.write_text(bench.path.read_text() + "# mine\n")
    monkeypatch.setattr(measured_machine, "num_cores", lambda: 4096)
    assert bench.up() == ""
    assert bench.num_measured == 1


def test_a_profile_that_cannot_be_read_is_told_and_stays(bench: Bench) -> None:
    bench.path.write_text("gpus: 3\n")
    told = bench.up()
    assert told.startswith(f"! {bench.path}: ")
    assert "without a plan" in told
    assert bench.num_measured == 0


def test_failed_measurement_is_reported(bench: Bench) -> None:
    bench.failure = DoctorError("nothing is free on /ssd1; delete jobs or files there")
    told = bench.up()
    assert "! not measured: nothing is free on /ssd1" in told
    assert "run without a plan until `windlass doctor` succeeds" in told
    assert not bench.path.exists()
    bench.failure = None
    assert "saved as" in bench.up()  # the next start tries again


def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(bench: Bench) -> None:
    bench.path.mkdir()
    with pytest.raises(DoctorError, match="cannot be written"):
        measure_and_save(bench.settings, bench.path, bench.told.append)
    with pytest.raises(DoctorError, match="no folder"):
        measure_and_save(bench.settings, bench.home / "missing" / "x.yaml", bench.told.append)


def test_nothing_is_measured_beside_jobs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayCluster, "pids", property(lambda _: (1,)))
    monkeypatch.setattr(lifecycle, "running_jobs", lambda _: ("ftjob-1",))
    assert "run `windlass doctor` once they have ended" in bench.up()
    assert bench.num_measured == 0
    monkeypatch.setattr(lifecycle, "running_jobs", lambda _: ())
    assert "saved as" in bench.up()


def test_facts_of_another_version_are_ignored(bench: Bench) -> None:
    bench.up()
    facts = bench.home / "measured.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "more": 1}))
    bench.up()
    assert bench.num_measured == 1
