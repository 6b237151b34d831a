"""The memory of an attempt is near the GPU that computes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.training import has_direct_io, make_partition, make_spec
from windlass.actors.job import GPU_WORKER, PARAM_SERVER, gpu_worker_name, ssd_name
from windlass.actors.runtime import local_box, local_runner, ray_box, start_up
from windlass.actors.runtime.factory import gpu_node
from windlass.actors.runtime.ray_box import RayBox
from windlass.actors.runtime.start_up import worker_names
from windlass.engine.device import device_choice
from windlass.storage.ids import ActorName


class ArenaMade(Exception):
    pass


def made_on(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Ends a start where it would make the arena. Returns the list to which the arena's node is added."""
    nodes: list[int | None] = []

    def create(path: str, nbytes: int, *, node: int | None, check_stop: Callable[[], None]) -> Any:
        nodes.append(node)
        raise ArenaMade

    monkeypatch.setattr(start_up.Arena, "create", create)
    return nodes


def test_arena_of_a_local_job_is_near_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = made_on(monkeypatch)
    monkeypatch.setattr(local_box, "memory_node", lambda device: {"cpu": None, "cuda": 1}[device.type])
    spec = make_spec(tmp_path / "job")
    for device in ("cpu", "cuda"):
        with pytest.raises(ArenaMade):
            local_runner.run_local(
                spec, partition=make_partition(spec), device=device, direct=has_direct_io(tmp_path / "job")
            )
    assert nodes == [None, 1]


def test_arena_of_a_local_job_on_devices_of_different_nodes_is_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = made_on(monkeypatch)
    monkeypatch.setattr(local_box, "memory_node", lambda device: device.index)
    spec = replace(make_spec(tmp_path / "job", num_microbatches=2), num_ranks=2)
    for devices in (("cuda:0", "cuda:1"), "cuda:1"):
        with pytest.raises(ArenaMade):
            local_runner.run_local(
                spec, partition=make_partition(spec), device=devices, direct=has_direct_io(tmp_path / "job")
            )
    assert nodes == [None, 1]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [((1,), 1), ((None,), None), ((1, 1), 1), ((0, 1), None)],
)
def test_gpu_workers_are_asked_for_their_nodes_and_different_ones_give_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: tuple[int | None, ...], expected: int | None
) -> None:
    gpu_workers = list(map(gpu_worker_name, range(len(nodes))))
    box = make_box(tmp_path, gpu_workers)
    calls: list[tuple[object, ...]] = []

    def call(*arguments: object, deadline_s: float) -> dict[ActorName, int | None]:
        calls.append(arguments)
        assert deadline_s == start_up.WORKER_DEADLINE_S, "the worker imports PyTorch first"
        return dict(zip(gpu_workers, nodes, strict=True))

    monkeypatch.setattr(box, "call", call)
    monkeypatch.setattr(ray_box, "has_several_nodes", lambda: True)
    assert box._gpu_node() == expected
    assert calls == [(gpu_workers, "gpu_node")]


def test_gpu_worker_is_not_asked_for_its_node_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make_box(tmp_path, [GPU_WORKER])
    monkeypatch.setattr(ray_box, "has_several_nodes", lambda: False)
    assert box._gpu_node() is None


def make_box(tmp_path: Path, gpu_workers: list[ActorName]) -> RayBox:
    context: Any = SimpleNamespace(spec=make_spec(tmp_path / "job"))
    box = RayBox(context, 0, lambda: None)
    box._workers = dict.fromkeys([ssd_name(0), PARAM_SERVER, *gpu_workers])
    return box


@pytest.mark.parametrize(("num_ranks", "computing"), [(1, ["gpu-0"]), (3, ["params-0", "gpu-0", "gpu-1", "gpu-2"])])
def test_worker_names_of_several_ranks_have_all_gpu_workers_and_a_param_server(
    tmp_path: Path, num_ranks: int, computing: list[str]
) -> None:
    spec = replace(make_spec(tmp_path / "job"), num_ranks=num_ranks, num_cpu_optimizers=2)
    servers = [f"ssd-{index}" for index in range(len(spec.ssd_dirs))]
    assert worker_names(spec) == [*servers, "optimizer-0", "optimizer-1", *computing]


def test_node_of_a_process_is_that_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_choice, "memory_node", lambda device: {"cpu": None, "cuda": 1}[device.type])
    assert gpu_node(uses_gpu=True) == 1
    assert gpu_node(uses_gpu=False) is None
