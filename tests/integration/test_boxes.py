"""A head and a box that has joined it: real TLS, the agent in a thread, and real dispatchers with stand-in runners."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.service.cluster import joined, running_head
from tests.support.service.cluster_stage import NAME, Cluster
from windlass.service.cluster.box.agent import run_until
from windlass.service.installation.home import node_of
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.job_status import JobStatus

WEIGHTS = bytes(range(256)) * 4 * 80_000  # 80 MiB: more than one part of an upload


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    box_home = tmp_path / "box"
    box_home.mkdir(mode=0o700)
    url = f"sqlite:///{tmp_path / 'box' / 'windlass.db'}"
    migrate(url)
    database = Database(url)
    with (
        running_head(tmp_path / "head") as head,
        joined(head, tmp_path, name=NAME, node=node_of(box_home)) as connection,
    ):
        cluster = Cluster(tmp_path, head.database, database, client=connection.client)
        cluster.now = time.monotonic()
        (cluster.head.settings.models_dir / "tiny" / "model.safetensors").write_bytes(WEIGHTS)
        ending = threading.Event()
        agent = threading.Thread(target=run_until, args=(ending, cluster.agent))
        agent.start()
        yield cluster
        ending.set()
        agent.join()
        cluster.close()
    database.close()


def wait_until(cluster: Cluster, is_so: Callable[[], object], seen: set[str] | None = None, job_id: str = "") -> None:
    """Lets both dispatchers work until something is so, and collects the job's reasons to wait."""
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        cluster.now = time.monotonic()
        cluster.head.tick()
        cluster.box.tick()
        if seen is not None:
            seen.add(cluster.head.job(job_id).waiting_reason or "")
        time.sleep(0.05)


def test_job_goes_to_a_box_runs_there_and_its_model_comes_back(cluster: Cluster) -> None:
    head, box = cluster.head, cluster.box
    wait_until(cluster, lambda: cluster.box_row().capacity is not None)
    job_id, reasons = cluster.prepare(box=NAME), set[str]()
    wait_until(cluster, lambda: head.status(job_id) is JobStatus.RUNNING, reasons, job_id)
    assert not head.runners.started
    assert any(f"copied to box {NAME}" in reason for reason in reasons)
    spec = box.runners.started[-1]
    assert (Path(spec.model_dir) / "model.safetensors").read_bytes() == WEIGHTS
    model = Path(spec.output_dir)
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(WEIGHTS[::-1])
    journal = box.journal(job_id, 1)
    for step in (1, 2):
        journal.append("metrics", f"Step {step}", step=step, total_steps=2, train_loss=1.0 / step)
    journal.append_outcome("succeeded", "done", trained_tokens=77)
    journal.close()
    box.end_runner(job_id)
    wait_until(cluster, lambda: head.status(job_id) is JobStatus.SUCCEEDED, reasons, job_id)
    assert any(f"results are being copied from box {NAME}" in reason for reason in reasons)
    assert (head.settings.fine_tuned_dir / model.name / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert head.job(job_id).step == 2
    wait_until(cluster, lambda: not cluster.has(job_id) and not model.exists())
    assert not (box.settings.jobs_dir / job_id).exists()
