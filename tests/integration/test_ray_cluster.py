"""The life of the Ray daemon: started, adopted, shared by drivers and ended, without harm to other processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.actors.lifecycle.session_priority import COMPUTING_NICENESS
from windlass.service.installation.process_ids import find_process, wait_until_gone
from windlass.service.machine.ray_cluster import RayCluster

_DRIVER = """
import sys
from pathlib import Path
from windlass.service.machine.ray_cluster import RayCluster
RayCluster(Path(sys.argv[1])).connect()
import ray

@ray.remote(num_cpus=0)
class Counter:
    def __init__(self): self.count = 0
    def add(self):
        self.count += 1
        return self.count

if sys.argv[2] == "make":
    counter = Counter.options(name="counter", lifetime="detached").remote()
else:
    counter = ray.get_actor("counter")
print(ray.get(counter.add.remote()), ray.cluster_resources()["CPU"], ray.cluster_resources()["device"])
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path)
    yield cluster
    cluster.stop()


def _drive(home: Path, action: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(home), action], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def _listening_addresses(pid: int) -> set[str]:
    import psutil

    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {c.laddr.ip for process in family for c in process.net_connections("tcp") if c.status == "LISTEN"}


@pytest.mark.long
def test_start_adopt_lose_and_stop(cluster: RayCluster, tmp_path: Path) -> None:
    assert not cluster.is_running
    assert cluster.ensure_running(num_cpus=1, num_gpus=0)
    pids = cluster.pids
    # Without Ray's dashboard, whose process would take 60 MiB.
    assert sorted(Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids) == ["gcs_server", "raylet"]
    assert (tmp_path / "ray-token").stat().st_mode & 0o777 == 0o600
    # Their session yields the cores to that of the service, where the kernel shares cores by session.
    for groups in (Path(f"/proc/{pid}/autogroup") for pid in pids):
        assert not groups.exists() or groups.read_text().endswith(f"nice {COMPUTING_NICENESS}\n")
    for pid in pids:
        assert {ip.removeprefix("::ffff:") for ip in _listening_addresses(pid)} <= {"127.0.0.1"}

    # An actor outlives its driver and answers the next driver, in another process.
    assert _drive(tmp_path, "make") == "1 1.0 1.0"
    assert _drive(tmp_path, "find") == "2 1.0 1.0"

    # Another RayCluster object, as after a restart of the service, adopts the same daemon.
    adopted = RayCluster(tmp_path)
    assert not adopted.ensure_running(num_cpus=1, num_gpus=0)
    assert adopted.pids == pids

    # A daemon that has lost one process is replaced as a whole.
    raylet = next(pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet")
    lost = [process for pid in pids if (process := find_process(pid)) is not None]
    lost_folder = Path(json.loads((tmp_path / "ray.json").read_text())["temp_dir"])
    assert lost_folder.exists()
    os.kill(raylet, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while cluster.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert cluster.ensure_running(num_cpus=1, num_gpus=0)
    assert wait_until_gone(lost, timeout_s=0)
    assert not set(cluster.pids) & set(pids)
    assert not lost_folder.exists()

    running = [process for pid in cluster.pids if (process := find_process(pid)) is not None]
    assert len(running) >= 2
    assert set(cluster.stop()) >= {process.pid for process in running}
    assert wait_until_gone(running, timeout_s=0)
    assert not cluster.is_running
    assert cluster.stop() == []


def test_a_reused_pid_is_not_ended(cluster: RayCluster, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as bystander:
        later = {"pid": bystander.pid, "start": "another-boot:1"}
        (tmp_path / "ray.json").write_text(
            json.dumps({"address": "127.0.0.1:1", "temp_dir": "/nonexistent", "core": [later], "helpers": []})
        )
        assert not cluster.is_running
        assert cluster.stop() == []
        assert bystander.poll() is None
        bystander.kill()


def test_a_failed_start_says_where_to_look_and_leaves_nothing(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.service.machine import ray_cluster

    monkeypatch.setattr(ray_cluster, "_OBJECT_STORE_NBYTES", 1)
    with pytest.raises(ray_cluster.RayStartError, match=r"exit code 1.*ray-start\.log"):
        cluster.ensure_running(num_cpus=1, num_gpus=0)
    assert not (tmp_path / "ray.json").exists()
    assert "object" in (tmp_path / "logs" / "ray-start.log").read_text().lower()
