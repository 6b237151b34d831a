"""A Ray cluster of two nodes that is managed from outside, as by KubeRay: all of a job is on the dispatcher's node."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from windlass.service.installation.process_ids import end_processes, find_process

pytestmark = pytest.mark.long

# The address of this machine as its own node, which Ray would otherwise take for the head's.
_BOX_IP = "127.0.0.2"
_DEADLINE_S = 150.0

# Runners report their node, and the node on which Ray gave them a device. Both nodes have one device.
_DRIVER = """
import functools, json, sys, time
from pathlib import Path
from types import SimpleNamespace
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
ray.init = functools.partial(ray.init, _node_ip_address=sys.argv[2])
from windlass.actors.runtime import ray_box
from windlass.actors.runtime import ray_runner as deploy
from windlass.service.machine.ray_node import RayNode

class Where:
    def __init__(self, spec):
        self.path, self.is_first = Path(spec.path), spec.attempt == 1
    def start(self):
        here = lambda: ray.get_runtime_context().get_node_id()
        has_gpus = ray_box.num_gpus_here() > 0
        self.group = ray_box.devices_here(1, has_gpus=has_gpus)  # held: the next runner finds none free on this node
        device = None
        if self.group.wait(120 if self.is_first else 5):
            there = PlacementGroupSchedulingStrategy(placement_group=self.group)
            device = ray.get(ray.remote(num_cpus=0)(here).options(scheduling_strategy=there).remote())
        with self.path.open("a") as told:
            print(json.dumps([here(), device]), file=told)

deploy.Runner = Where
node = RayNode.join(sys.argv[1])
for attempt in (1, 2):
    deploy.start_runner(SimpleNamespace(job="ftjob-1", attempt=attempt, path=sys.argv[3]))
print(json.dumps([len(ray.nodes()), node.node_id, node.resources.num_cores, node.is_running]), flush=True)
sys.stdin.readline()
while node.is_running:
    time.sleep(0.1)
print("lost", flush=True)
"""


@dataclass(frozen=True)
class Cluster:
    """Two nodes on this machine: a head, and a worker node with the address `_BOX_IP`."""

    address: str
    environment: Mapping[str, str]
    temp_dir: Path

    def start(self, *options: str) -> None:
        common = ("--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=83886080", "--num-gpus=0")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *common, "--disable-usage-stats", *options]
        subprocess.run(
            [*command, '--resources={"device": 1}'],
            env=self.environment,
            check=True,
            timeout=_DEADLINE_S,
            stdout=subprocess.DEVNULL,
        )

    def processes(self) -> list[psutil.Process]:
        found = psutil.process_iter(["name", "cmdline"])
        return [p for p in found if any(f"{self.temp_dir}/" in word for word in p.info["cmdline"] or ())]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    temp_dir = Path(tempfile.mkdtemp(prefix="windlass-ray-", dir="/tmp"))  # short enough for the paths of sockets
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = Cluster(f"localhost:{port}", {**os.environ, **tokens}, temp_dir)
    try:
        head = (f"--port={port}", f"--temp-dir={temp_dir}/ray", "--include-dashboard=false", "--no-monitor")
        cluster.start("--head", "--num-cpus=0", *head)
        cluster.start(f"--address={cluster.address}", f"--node-ip-address={_BOX_IP}", "--num-cpus=1")
        yield cluster
    finally:
        while left := [p for process in cluster.processes() if (p := find_process(process.pid)) is not None]:
            end_processes(left, grace_s=1.0)
        shutil.rmtree(temp_dir)


def test_ray_job_runs_on_dispatcher_node_and_node_loss_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = [sys.executable, "-c", _DRIVER, cluster.address, _BOX_IP, str(told)]
    with subprocess.Popen(
        command, env=cluster.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        try:
            _check(driver, cluster, told)
        finally:
            driver.kill()


def _check(driver: "subprocess.Popen[str]", cluster: Cluster, told: Path) -> None:
    assert driver.stdin is not None
    assert driver.stdout is not None
    num_nodes, here, num_cores, is_running = json.loads(driver.stdout.readline())
    assert (num_nodes, num_cores, is_running) == (2, 1, True)
    # The second runner waits for the device of this node although the head's is free.
    assert [json.loads(line) for line in told.read_text().splitlines()] == [[here, here], [here, None]]

    raylets = [p for p in cluster.processes() if p.info["name"] == "raylet"]
    box = next(p for p in raylets if any(_BOX_IP in word for word in p.info["cmdline"]))
    box.kill()
    driver.stdin.write("\n")
    driver.stdin.flush()
    # Ray prints its own messages about the end of the raylet there, too.
    assert "lost" in driver.communicate(timeout=_DEADLINE_S)[0].splitlines()
