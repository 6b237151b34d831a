"""The check of a job's GPUs in the process that accepts the job."""

from pathlib import Path

import pytest

from windlass.planner.hardware.hardware import Hardware, example_machines, save_hardware
from windlass.planner.hardware.yaml_files import load
from windlass.service.installation.machine import Gpu
from windlass.service.installation.settings import HARDWARE_FILE, Settings
from windlass.service.jobs import spec_builder
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.machine.devices import check_gpus
from windlass.service.validation.request_errors import ApiError

EIGHT_GPUS = load(Hardware, example_machines()["a100-40g-server"])


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineResources, "here", lambda _: MachineResources(num_cores=4, num_gpus=2))


def refused(settings: Settings, gpus: int, *, other: Hardware | None = None) -> bool:
    try:
        check_gpus(settings, gpus, other=other)
    except ApiError as error:
        return (error.param, error.code) == ("windlass.gpus", "invalid_value")
    return False


def test_gpus_are_those_of_this_machine_or_of_the_described_one(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert [refused(settings, gpus) for gpus in (1, 2, 3)] == [False, False, True]
    assert [refused(settings, gpus, other=EIGHT_GPUS) for gpus in (8, 9)] == [False, True]


def test_several_gpus_of_this_machine_must_be_of_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of the fixture
    found = [Gpu(name=name, memory_nbytes=1, driver_version="1") for name in ("RTX 4090", "RTX 3090", "RTX 4090")]
    monkeypatch.setattr(spec_builder, "find_gpus", lambda: found)
    settings = Settings(home=tmp_path)
    assert [refused(settings, gpus) for gpus in (1, 2)] == [False, True]
    del found[1]
    assert not refused(settings, 2)


def test_gpus_of_a_cluster_are_those_of_its_profile_and_without_one_the_dispatcher_checks(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, ray_address="head:6379")
    assert not refused(settings, 16)
    save_hardware(EIGHT_GPUS, tmp_path / HARDWARE_FILE, comment="measured")
    assert [refused(settings, gpus) for gpus in (8, 9)] == [False, True]


def test_no_setting_is_blamed_for_another_machine(tmp_path: Path) -> None:
    no_gpu = EIGHT_GPUS.model_copy(update={"gpus": EIGHT_GPUS.gpus.model_copy(update={"count": 0})})
    with pytest.raises(ApiError) as refusal:
        check_gpus(Settings(home=tmp_path, cpu_ranks=4), 2, other=no_gpu)
    assert str(refusal.value).endswith("its CPU counts as 1 device")
