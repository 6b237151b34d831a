"""The modules that each actor of a job imports while it waits for its set-up."""

import importlib.util

import pytest

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import GPU_WORKER, make_context, optimizer_name, ssd_name
from windlass.actors.runtime import factory as building
from windlass.actors.runtime.factory import import_for
from windlass.storage.ids import ActorName, Attempt

MODELS = "transformers.modeling_utils"


@pytest.mark.parametrize(
    ("name", "attempt", "expected"),
    [
        (ssd_name(1), 1, ["windlass.actors.ssd.server"]),
        (GPU_WORKER, 2, ["windlass.actors.gpu_worker.worker", MODELS]),
        (optimizer_name(0), 1, ["windlass.actors.optimizer.worker", MODELS]),
        (optimizer_name(0), 2, ["windlass.actors.optimizer.worker"]),
        (optimizer_name(1), 1, ["windlass.actors.optimizer.worker"]),
    ],
)
def test_actors_import_their_modules_and_weight_loader_also_models(
    name: ActorName, attempt: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(building.importlib, "import_module", imported.append)
    spec = make_spec(attempt=Attempt(attempt), ssd_dirs=("/0", "/1"))
    import_for(name, make_context(spec, make_layout(2048, 5000), "arena"))
    monkeypatch.undo()
    assert imported == expected
    for module in imported:
        assert importlib.util.find_spec(module) is not None
