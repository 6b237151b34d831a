import pytest

from windlass.actors import gpu_worker
from windlass.planner import plan


@pytest.fixture
def small_activation_slots(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a slot: as small as the models of tests are."""
    monkeypatch.setattr(plan, "ACTIVATION_SLOT_NBYTES", 4096)
    return 4096


@pytest.fixture
def unchecked_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tiny model is checked before a job with choices of its own: for tests that break it, or run many jobs."""
    monkeypatch.setattr(gpu_worker, "check_architecture", lambda *_: None)
