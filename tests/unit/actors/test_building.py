"""What each actor of a job imports while it waits for its set-up."""

import importlib.util

import pytest

from tests.unit.actors.specs import make_layout, make_spec
from windlass.actors import building
from windlass.actors.building import import_for
from windlass.actors.context import GPU_WORKER, make_context, optimizer_name, ssd_name
from windlass.storage.ids import ActorName, Attempt

MODELS = "transformers.modeling_utils"


@pytest.mark.parametrize(
    ("name", "attempt", "expected"),
    [
        (ssd_name(1), 1, ["windlass.actors.ssd_server"]),
        (GPU_WORKER, 2, ["windlass.actors.gpu_worker", MODELS]),
        (optimizer_name(0), 1, ["windlass.actors.cpu_optimizer", MODELS]),
        (optimizer_name(0), 2, ["windlass.actors.cpu_optimizer"]),
        (optimizer_name(1), 1, ["windlass.actors.cpu_optimizer"]),
    ],
)
def test_each_imports_what_it_needs_and_who_loads_the_weights_also_models(
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
