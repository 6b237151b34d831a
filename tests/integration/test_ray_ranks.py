"""The processes of a job with several GPU workers on real Ray: each gets a device, and a GPU if there are any."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.service.machine.ray_cluster import RayCluster

# Starts the processes of two jobs, with stand-ins for the actors, which report what Ray gave them. A third job finds
# no devices until the first has ended. It is a separate process because Ray reads its environment when imported.
_DRIVER = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from windlass.service.machine.ray_cluster import RayCluster
RayCluster(Path(sys.argv[1])).connect()
import ray
from ray.util.placement_group import remove_placement_group
from windlass.actors.runtime import ray_box

class StandIn:
    def __init__(self, name, context, num_threads, niceness, *, uses_gpu):
        self.facts = {"threads": num_threads, "niceness": niceness, "uses_gpu": uses_gpu}
    def address(self):
        given = ray.get_runtime_context().get_assigned_resources()
        return self.facts | {"given": given, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}

ray_box._RemoteShell = ray.remote(StandIn)
spec = SimpleNamespace(
    box=0, num_ranks=2, num_cpu_optimizers=1, ssd_dirs=("ssd",), compute_threads=3, optimizer_threads=5, deadline_s=60.0
)
has_gpus = ray_box.num_gpus_here() > 0
context = SimpleNamespace(spec=spec)
jobs, groups, boxes = [], [], []
for _ in range(2):
    group = ray_box.devices_here(spec.num_ranks, has_gpus=has_gpus)
    assert group.wait(60)
    box = ray_box.RayBox(context, 0, lambda: None)
    jobs.append(box._make_workers(group, has_gpus=has_gpus))
    groups.append(group)
    boxes.append(box)
third = ray_box.devices_here(spec.num_ranks, has_gpus=has_gpus)
was_free = third.wait(3)
boxes[0]._kill_workers()
remove_placement_group(groups[0])
print(json.dumps({"jobs": jobs, "third": [was_free, third.wait(60)]}))
"""


@pytest.mark.long
@pytest.mark.parametrize(("num_gpus", "cpu_ranks"), [(4, 1), pytest.param(0, 4, marks=pytest.mark.long)])
def test_gpu_workers_of_two_jobs_have_devices_of_their_own(direct_home: Path, num_gpus: int, cpu_ranks: int) -> None:
    cluster = RayCluster(direct_home)
    cluster.ensure_running(num_cpus=2, num_gpus=num_gpus, cpu_ranks=cpu_ranks)
    try:
        result = subprocess.run(
            [sys.executable, "-c", _DRIVER, str(direct_home)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=200,
        )
    finally:
        cluster.stop()
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    gpus = [_gpus_of(job, has_gpus=num_gpus > 0) for job in told["jobs"]]
    if num_gpus:
        assert sorted(gpu for of_job in gpus for gpu in of_job) == ["0", "1", "2", "3"]
    assert told["third"] == [False, True]


def _gpus_of(job: dict[str, Any], *, has_gpus: bool) -> list[str]:
    """Checks what the processes of a job were given, and returns the GPUs that its GPU workers see."""
    assert list(job) == ["ssd-0", "optimizer-0", "params-0", "gpu-0", "gpu-1"]
    assert {name: facts["threads"] for name, facts in job.items()} == {
        "ssd-0": 1,
        "optimizer-0": 5,
        "params-0": 1,
        "gpu-0": 3,
        "gpu-1": 3,
    }
    for name, facts in job.items():
        computes = name.startswith("gpu-")
        given = {each: amount for each, amount in facts["given"].items() if not each.startswith("bundle")}
        assert given.get("device", 0) == computes
        assert given.get("GPU", 0) == (computes and has_gpus)
        assert facts["uses_gpu"] == (computes and has_gpus)
    assert job["gpu-0"]["niceness"] == job["gpu-1"]["niceness"] <= job["params-0"]["niceness"]
    return [job[name]["visible"] for name in ("gpu-0", "gpu-1")]
