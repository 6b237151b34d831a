"""The memory of an attempt is near the GPU that computes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.support.training import has_direct_io, make_partition, make_spec
from windlass.actors.job import GPU_WORKER
from windlass.actors.runtime import local_runner, ray_runner, start_up
from windlass.actors.runtime.factory import gpu_node
from windlass.actors.runtime.ray_runner import Runner
from windlass.engine.device import device_choice


class ArenaMade(Exception):
    pass


def made_on(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Ends a start where it would make the arena. Returns the list to which the arena's node is added."""
    nodes: list[int | None] = []

    def create(path: str, nbytes: int, *, node: int | None, check_stop: None) -> Any:
        nodes.append(node)
        raise ArenaMade

    monkeypatch.setattr(start_up.Arena, "create", create)
    return nodes


def test_arena_of_a_local_job_is_near_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = made_on(monkeypatch)
    monkeypatch.setattr(local_runner, "memory_node", lambda device: {"cpu": None, "cuda": 1}[device.type])
    spec = make_spec(tmp_path / "job")
    for device in ("cpu", "cuda"):
        with pytest.raises(ArenaMade):
            local_runner.run_local(
                spec, partition=make_partition(spec), device=device, direct=has_direct_io(tmp_path / "job")
            )
    assert nodes == [None, 1]


@pytest.mark.parametrize(("several", "expected"), [(True, 1), (False, None)])
def test_gpu_worker_is_asked_for_its_node_where_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool, expected: int | None
) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    runner = Runner(make_spec(tmp_path / "job"))
    calls: list[tuple[object, ...]] = []

    def call(*arguments: object, deadline_s: float) -> dict[str, int]:
        calls.append(arguments)
        assert deadline_s == start_up.WORKER_DEADLINE_S, "the worker imports PyTorch first"
        return {GPU_WORKER: 1}

    monkeypatch.setattr(runner, "_call", call)
    monkeypatch.setattr(ray_runner, "has_several_nodes", lambda: several)
    assert runner._gpu_node() == expected
    assert calls == ([([GPU_WORKER], "gpu_node")] if several else [])


def test_node_of_a_process_is_that_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_choice, "memory_node", lambda device: {"cpu": None, "cuda": 1}[device.type])
    assert gpu_node(uses_gpu=True) == 1
    assert gpu_node(uses_gpu=False) is None
