"""All actors in one process: a job that cannot run ends with the reason, and leaves nothing behind."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import has_direct_io, journal_of, leftovers_of, make_partition, make_spec
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.memory_plan.plan import PlanError
from windlass.storage.memory.capacity import InsufficientSpaceError
from windlass.storage.ssd import volume
from windlass.storage.ssd.device import SsdDevice


def test_a_budget_too_small_is_refused(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, host_memory_nbytes=100_000)
    with pytest.raises(PlanError, match=r"needs .* more than its budget of 97\.66 KiB"):
        run_local(spec, partition=make_partition(spec))
    assert leftovers_of(spec) == []
    assert not Path(spec.job_dir, "journal.jsonl").exists()


def test_a_disk_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two directories are on one disk, which would hold the share of either one alone."""
    spec = make_spec(tmp_path)
    numel = make_partition(spec).layout.numel
    free = 2 * 12 * numel  # both generations of master, exp_avg and exp_avg_sq; the records need some more
    monkeypatch.setattr(volume, "directory_free_nbytes", lambda directory: free)
    with pytest.raises(InsufficientSpaceError) as refused:
        run_local(spec, partition=make_partition(spec))
    assert refused.value.free_nbytes == free
    assert refused.value.needed_nbytes > free
    assert str(tmp_path) in str(refused.value)
    assert leftovers_of(spec) == []


def test_a_model_without_its_weights(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    (Path(spec.model_dir) / "model.safetensors").unlink()
    outcome = run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "failed"
    assert outcome["error"]["message"].startswith("optimizer-0: ")
    assert "safetensors" in outcome["error"]["message"]
    assert leftovers_of(spec) == []


@pytest.mark.short("read")
@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_ssd_that_fails_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    spec = make_spec(tmp_path)
    move, num_moves = getattr(SsdDevice, verb), Counter[str]()

    def fails_after_a_while(self: SsdDevice, offset: int, buffer: memoryview) -> Any:
        if self.path.parent.name == "ssd1":
            num_moves[verb] += 1
            if num_moves[verb] > 200:
                raise OSError(5, "Input/output error, for the test")
        return move(self, offset, buffer)

    monkeypatch.setattr(SsdDevice, verb, fails_after_a_while)
    outcome = run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "failed"
    assert outcome["error"]["code"] == "training_failed"
    place = f"SSD {spec.ssd_dirs[1]}, job {spec.job}, extent "
    assert outcome["error"]["message"].startswith(f"ssd-1: StoreIoError: {place}")
    assert f"could not {verb}: [Errno 5] Input/output error, for the test" in outcome["error"]["message"]
    assert journal_of(spec)[-1].data["error"] == outcome["error"]
    assert "Traceback" in Path(spec.job_dir, "error.txt").read_text()
    assert leftovers_of(spec) == []
