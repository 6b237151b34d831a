import pytest

from windlass.actors.gpu_worker import worker as gpu_worker


@pytest.fixture
def unchecked_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the check of tiny models before a job with activation choices.

    For tests that break the model, or run many jobs.
    """
    monkeypatch.setattr(gpu_worker, "check_architecture", lambda *_: None)
