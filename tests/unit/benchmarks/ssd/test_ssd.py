import shutil
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.ssd.benchmark import Comparison, best_setting, in_flight_of, together
from benchmarks.ssd.contenders import LocalServer, Setup
from benchmarks.ssd.peers import DeepSpeedAio, Fio, FioSetting, PeerMissingError
from benchmarks.ssd.requests import Traffic, geometry_of
from tests.support.training import has_direct_io
from windlass.storage.io.engines import DEFAULT_IO
from windlass.storage.ssd.volume import Volume

MIB = 1 << 20


@pytest.mark.parametrize("request_nbytes", [2 * MIB, 16 * MIB, 1 << 30])
def test_a_request_is_all_states_of_a_chunk(request_nbytes: int) -> None:
    geometry = geometry_of(request_nbytes, 4 << 30)
    assert 0.97 * request_nbytes < geometry.extent_nbytes <= request_nbytes
    assert geometry.num_chunks == (4 << 30) // geometry.extent_nbytes
    assert 2 <= in_flight_of(request_nbytes) <= geometry.num_chunks


def test_the_fastest_setting_is_given_to_a_peer() -> None:
    assert best_setting(lambda setting: -abs(setting - 7), [1, 8, 20]) == 8


def compared(**rates: list[float]) -> Comparison:
    comparison = Comparison.__new__(Comparison)
    comparison.rates = defaultdict(list)
    comparison.missing = {name: "not installed" for name in (Fio.name, DeepSpeedAio.name) if name not in rates}
    for name, values in rates.items():
        comparison.rates[(Traffic.READ, name)] = values
    return comparison


def test_windlass_is_compared_with_the_better_peer_by_medians() -> None:
    comparison = compared(
        **{"windlass": [1.0, 3.0, 9.0], Fio.name: [2.0, 2.0, 8.0], DeepSpeedAio.name: [4.0, 4.0, 0.1]}
    )
    assert comparison.over_best_peer(Traffic.READ) == 3.0 / 4.0


def test_without_a_peer_there_is_no_ratio() -> None:
    assert compared(windlass=[1.0]).over_best_peer(Traffic.READ) is None


@pytest.mark.parametrize("checksums", [True, False])
def test_a_server_moves_what_is_asked_for(tmp_path: Path, checksums: bool) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip(f"the file system of {tmp_path} refuses O_DIRECT")
    setup = Setup(tmp_path / "ssd", geometry_of(2 * MIB, 8 * MIB), 2, tmp_path)
    server = LocalServer(setup, DEFAULT_IO, checksums=checksums)
    server.requester.prepare()
    for traffic in Traffic:
        assert server.measure(traffic, 0.01) > 0
    assert server.latency_s(setup.geometry.region_nbytes(setup.geometry.kinds[1])) > 0
    server.close()
    setup.close()
    volume = Volume.open(tmp_path / "ssd")
    assert volume.allocations() == {}
    volume.close()


def test_servers_are_measured_at_the_same_time() -> None:
    barrier = threading.Barrier(3)

    def measure(traffic: Traffic, seconds: float) -> float:
        barrier.wait(30.0)
        return 2.0

    assert together([measure] * 3, 0.1) == [2.0] * 3


def test_fio_is_asked_for_the_mix_and_its_bytes_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout='{"jobs": [{"read": {"bw_bytes": 10}, "write": {"bw_bytes": 14}}]}')

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("benchmarks.ssd.peers.subprocess.run", run)
    fio = Fio(tmp_path / "file", 4 * MIB)
    assert fio.measure(Traffic.MIX, 0.5, FioSetting(block_nbytes=MIB, depth=8)) == 24
    assert {"--rw=rw", "--rwmixread=46", "--bs=1048576", "--iodepth=8", "--ioengine=io_uring", "--direct=1"} <= set(
        commands[-1]
    )
    fio.close()
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_is_not_installed_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PeerMissingError, match="fio is not installed"):
        Fio(tmp_path / "file", MIB)
