"""Training with states on raw block devices (files behind loop devices), cut off and resumed there."""

import dataclasses
from pathlib import Path

import pytest

from tests.integration.conftest import MakeLoop
from tests.support.cut_off import CutOff
from tests.support.training import exported_params, losses_of, make_partition, make_spec
from windlass.actors.messages import Message, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.storage.ids import ActorName, Attempt
from windlass.storage.ssd.calibration import Calibration
from windlass.storage.ssd.volume import Volume

_IMAGE_NBYTES = 256 << 20


@pytest.fixture
def devices(make_loop: MakeLoop) -> tuple[str, ...]:
    return tuple(str(make_loop(nbytes=_IMAGE_NBYTES)) for _ in range(2))


def test_training_on_raw_devices_is_that_on_files(tmp_path: Path, devices: tuple[str, ...]) -> None:
    on_files = make_spec(tmp_path / "files", total_steps=4, evaluate_every=None)
    assert run_local(on_files, partition=make_partition(on_files))["status"] == "succeeded"
    made = make_spec(tmp_path / "raw", total_steps=4, evaluate_every=None)
    on_devices = dataclasses.replace(made, ssd_dirs=devices)

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, UpdateStep) and message.step == 3:
            raise CutOff

    with pytest.raises(CutOff):
        run_local(on_devices, partition=make_partition(made), on_message=look)
    again = dataclasses.replace(on_devices, attempt=Attempt(2))
    assert run_local(again, partition=make_partition(made))["status"] == "succeeded"
    assert losses_of(made) == losses_of(on_files)
    expected = exported_params(on_files)
    assert all(param.equal(expected[name]) for name, param in exported_params(made).items())
    for device in devices:
        volume = Volume.open(device)
        assert volume.allocations() == {}
        known = volume.calibration()
        volume.close()
        assert known is not None
        assert Calibration.from_json(known).mixed_bytes_per_s > 0
