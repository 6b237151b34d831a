"""The start of a job's actors: the modules that each imports, and its device."""

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from windlass.actors.gpu_worker import worker
from windlass.actors.job.context import GPU_WORKER, PARAM_SERVER, gpu_worker_name, optimizer_name, ssd_name
from windlass.actors.runtime import factory as building
from windlass.actors.runtime.factory import LocalOptions, import_for, stop_actor
from windlass.actors.ssd import param_server
from windlass.engine.device import device_choice, malloc
from windlass.engine.model import partition
from windlass.storage.ids import ActorName, Formats, Precision, StatePrecision
from windlass.storage.integrity.errors import StoreIoError

MODELS = "transformers.modeling_utils"


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """Not all tests stop the actors that they start."""
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ssd_name(1), ["windlass.actors.ssd.server"]),
        (GPU_WORKER, ["windlass.actors.gpu_worker.worker", MODELS]),
        (optimizer_name(0), ["windlass.actors.optimizer.worker"]),
        (PARAM_SERVER, ["windlass.actors.ssd.param_server"]),
    ],
)
def test_actors_import_their_modules_and_the_one_that_computes_also_models(
    name: ActorName, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(building.importlib, "import_module", imported.append)
    import_for(name)
    monkeypatch.undo()
    assert imported == expected
    for module in imported:
        assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(("device", "expected"), [(torch.device("cuda", 0), "cuda:0"), (torch.device("cpu"), "cpu")])
def test_the_worker_of_a_gpu_gets_its_number(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, expected: str
) -> None:
    """Without it torch refuses to limit the GPU's memory."""
    made: list[str] = []
    monkeypatch.setattr(device_choice, "compute_device", lambda *, uses_gpu: device)
    monkeypatch.setattr(malloc, "retain_freed_memory", lambda: None)
    monkeypatch.setattr(partition, "partition_folder", lambda *_: None)
    monkeypatch.setattr(worker, "GpuWorker", lambda *_, rank, device: made.append(device))
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(model_dir=""), formats=Formats(Precision.BF16, StatePrecision.FP32)
    )
    building.start_actor(GPU_WORKER, context, None, print, uses_gpu=True)
    assert made == [expected]


def test_each_gpu_worker_gets_its_rank_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, str]] = []
    monkeypatch.setattr(worker, "GpuWorker", lambda *_, rank, device, **__: made.append((rank, device)))
    local = LocalOptions(partitions=(None,) * 2, devices=("cuda:1", "cuda:3"), poison_released=False, direct=True)
    context: Any = SimpleNamespace()
    for rank in range(2):
        building.start_actor(gpu_worker_name(rank), context, None, print, local=local)
    assert made == [(0, "cuda:1"), (1, "cuda:3")]


@pytest.mark.parametrize(("error", "is_closed"), [(StoreIoError("SSD x: no write"), False), (ValueError(), True)])
def test_ssd_server_starts_although_the_space_of_other_layouts_cannot_be_freed(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_closed: bool
) -> None:
    """After an error that is not the SSD's, the space is closed."""
    made: list[ActorName] = []
    monkeypatch.setattr("windlass.actors.ssd.server.SsdServer", lambda name, *_, **__: made.append(name))
    monkeypatch.setattr("windlass.actors.ssd.SsdServer", lambda name, *_, **__: made.append(name))
    space, context = MagicMock(), MagicMock()
    space.free_other_epochs.side_effect = error
    with pytest.raises(ValueError) if is_closed else nullcontext():
        building.start_actor(ssd_name(0), context, None, print, space=space)
    assert (made, space.close.called) == ([] if is_closed else [ssd_name(0)], is_closed)


def test_param_server_is_started_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(param_server, "ParamServer", lambda *arguments: made.append(arguments))
    context: Any = SimpleNamespace()
    building.start_actor(PARAM_SERVER, context, None, print)
    assert made == [(PARAM_SERVER, context, print)]


@pytest.mark.parametrize("is_over", [False, True])
def test_stop_actor_of_each_kind_lets_only_ssd_servers_delete_their_states(is_over: bool) -> None:
    stopped: list[dict[str, bool]] = []

    class Actor:
        def stop(self, **options: bool) -> None:
            stopped.append(options)

    for name in (ssd_name(12), optimizer_name(0), GPU_WORKER):
        stop_actor(name, Actor(), is_over=is_over)
    assert stopped == [{"delete_store": is_over}, {}, {}]


def test_the_collector_of_cycles_leaves_out_what_was_there_before_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(param_server, "ParamServer", MagicMock())
    gc.unfreeze()
    actor = building.start_actor(PARAM_SERVER, MagicMock(), None, print)
    num_frozen = gc.get_freeze_count()
    assert num_frozen > 10 * len(gc.get_objects())  # else a collection would look at all modules
    stop_actor(PARAM_SERVER, actor, is_over=True)
    assert gc.get_freeze_count() == 0
