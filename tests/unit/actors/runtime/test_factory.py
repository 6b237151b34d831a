"""The modules that each actor of a job imports while it waits for its set-up."""

import importlib.util

import pytest

from windlass.actors.job.context import GPU_WORKER, optimizer_name, ssd_name
from windlass.actors.runtime import factory as building
from windlass.actors.runtime.factory import import_for, stop_actor
from windlass.storage.ids import ActorName

MODELS = "transformers.modeling_utils"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ssd_name(1), ["windlass.actors.ssd.server"]),
        (GPU_WORKER, ["windlass.actors.gpu_worker.worker", MODELS]),
        (optimizer_name(0), ["windlass.actors.optimizer.worker"]),
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


@pytest.mark.parametrize("is_over", [False, True])
def test_stop_actor_of_each_kind_lets_only_ssd_servers_delete_their_states(is_over: bool) -> None:
    stopped: list[dict[str, bool]] = []

    class Actor:
        def stop(self, **options: bool) -> None:
            stopped.append(options)

    for name in (ssd_name(12), optimizer_name(0), GPU_WORKER):
        stop_actor(name, Actor(), is_over=is_over)
    assert stopped == [{"delete_store": is_over}, {}, {}]
