"""This machine's node of a Ray cluster that is managed from outside."""

from typing import Any

import pytest
import ray

from windlass.service.installation.machine import Gpu
from windlass.service.machine import ray_node
from windlass.service.machine.ray_cluster import RayStartError
from windlass.service.machine.ray_node import RayNode

HERE, HEAD = "here", "head"


class Cluster:
    """Stands for Ray: its nodes, of which this process is on `HERE`."""

    def __init__(self) -> None:
        self.nodes = {HEAD: self.node(HEAD, {}), HERE: self.node(HERE, {"CPU": 3.0, "device": 1.0})}

    @staticmethod
    def node(node_id: str, resources: dict[str, float], alive: bool = True) -> dict[str, Any]:
        return {"NodeID": node_id, "Alive": alive, "Resources": resources}

    def get_node_id(self) -> str:
        return HERE


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: list(cluster.nodes.values()))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: cluster)
    monkeypatch.setattr(ray_node, "num_cores", lambda: 16)
    return cluster


@pytest.mark.parametrize(
    ("resources", "num_cores", "num_gpus"),
    [
        ({"CPU": 3.0, "device": 1.0}, 3, 0),
        ({"CPU": 64.0, "GPU": 2.0, "device": 2.0}, 16, 2),  # not more than this process may use
        ({"GPU": 1.0, "device": 1.0}, 16, 1),
    ],
)
def test_jobs_get_what_the_node_of_this_machine_offers(
    cluster: Cluster, resources: dict[str, float], num_cores: int, num_gpus: int
) -> None:
    cluster.nodes[HERE] = Cluster.node(HERE, resources)
    resources = RayNode.join("head:6379").resources
    assert (resources.num_cores, resources.num_gpus) == (num_cores, num_gpus)


@pytest.mark.parametrize(("models", "refused"), [("AA", False), ("BA", True)])
def test_models_of_the_gpus_are_known(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, models: str, refused: bool
) -> None:
    gpus = [Gpu(name=name, memory_nbytes=1, driver_version="1") for name in models]
    monkeypatch.setattr(ray_node, "find_gpus", lambda: gpus)
    cluster.nodes[HERE] = Cluster.node(HERE, {"GPU": 2.0, "device": 2.0})
    resources = RayNode.join("head:6379").resources
    assert (resources.gpu_models, resources.why_too_many(2) is not None) == (tuple(sorted(set(models))), refused)


@pytest.mark.parametrize("resources", [{"CPU": 3.0}, {"CPU": 3.0, "GPU": 2.0, "device": 1.0}])
def test_a_node_that_does_not_offer_all_its_devices_is_refused(cluster: Cluster, resources: dict[str, float]) -> None:
    cluster.nodes[HERE] = Cluster.node(HERE, resources)
    needed = 2 if "GPU" in resources else 1
    with pytest.raises(RayStartError, match=rf"--resources='\{{\"device\": {needed}\}}'"):
        RayNode.join("head:6379")


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_node_without_gpus_offers_as_many_devices_as_the_setting_says(cluster: Cluster, num_devices: int) -> None:
    cluster.nodes[HERE] = Cluster.node(HERE, {"CPU": 3.0, "device": float(num_devices)})
    assert RayNode.join("head:6379", cpu_ranks=num_devices).resources.num_devices == num_devices
    with pytest.raises(RayStartError, match=r"--resources='\{\"device\": 2\}'"):
        RayNode.join("head:6379", cpu_ranks=2)
    # A daemon of our own may have been started under another setting.
    assert RayNode.of_this_process().resources.num_devices == num_devices


def test_a_node_runs_until_the_cluster_says_that_it_does_not(cluster: Cluster) -> None:
    node = RayNode.join("head:6379")
    assert node.is_running
    # A node that is started again on this machine is another node.
    cluster.nodes["again"] = Cluster.node("again", {"CPU": 3.0, "device": 1.0})
    cluster.nodes[HERE] = Cluster.node(HERE, {}, alive=False)
    assert not node.is_running
    del cluster.nodes[HERE]
    assert not node.is_running


def test_a_cluster_without_a_node_on_this_machine_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError("no node info found")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RayStartError, match=r"head:6379 on this machine \(no node info found\)"):
        RayNode.join("head:6379")
    del cluster.nodes[HERE]
    monkeypatch.setattr(ray, "init", lambda **_: None)
    with pytest.raises(RayStartError, match="just ended"):
        RayNode.join("head:6379")
