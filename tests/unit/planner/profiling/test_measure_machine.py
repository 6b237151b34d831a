"""Measuring the machine: every rate is measured with real work on this machine."""

import dataclasses
import json

import pytest
import torch

from windlass.planner.profiling import measure_machine
from windlass.planner.profiling.measure_machine import measure
from windlass.storage.ids import Kernel, Precision


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_machine, "_MATRIX_SIZE", {"cpu": 256})
    monkeypatch.setattr(measure_machine, "_COPY_NBYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(measure_machine, "_UPDATE_NUMEL", 1 << 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("precision", Precision)
def test_all_rates_are_measured(precision: Precision) -> None:
    rates = measure(precision, None, kernel=Kernel.FUSED)
    assert (rates.device, rates.num_devices, rates.device_nbytes) == ("CPU", 0, None)
    numbers = {
        name: rate
        for name, rate in dataclasses.asdict(rates).items()
        if not name.endswith(("device", "devices", "device_nbytes"))
    }
    assert len(numbers) == 7
    # A number beyond this range (the slowest machine under load; the speed of light between cores) has a wrong unit.
    assert all(1e4 < rate < 1e15 for rate in numbers.values()), numbers


@pytest.mark.usefixtures("small")
def test_it_prints_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["measure_machine", "--precision", "fp32"])
    monkeypatch.setattr(measure_machine, "_adam_params", lambda *_: 1.0)
    measure_machine.main()
    assert json.loads(capsys.readouterr().out)["adam_params"] == 1.0


def test_main_with_a_gpu_that_pytorch_cannot_use_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["measure_machine", "--gpu"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="the driver lists a GPU that PyTorch"):
        measure_machine.main()
