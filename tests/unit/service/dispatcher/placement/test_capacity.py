"""The capacity of a machine and its use by jobs, on real volumes and files."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from windlass.amounts import GIB
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.report import PlanReport
from windlass.service.dispatcher.placement import capacity as box
from windlass.service.dispatcher.placement.capacity import (
    BUFFERS,
    DEVICES,
    HOST_MEMORY,
    Demand,
    MachineCapacity,
    SsdSpace,
    demand_of,
    read_capacity,
)
from windlass.service.installation.settings import Settings
from windlass.service.jobs.machine_resources import MachineResources
from windlass.storage.ids import Attempt, JobId
from windlass.storage.memory.arena import Arena, arena_path
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES
from windlass.storage.ssd.volume_format import Demand as Room

TWO_GPUS = MachineResources(num_cores=4, num_gpus=2)
MIB = 1 << 20


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(box, "ARENA_DIR", tmp_path / "shm")
    made = Settings(home=tmp_path)
    made.make_dirs()
    return made


def put(path: Path, job: str, num_extents: int) -> int:
    volume = Volume.open(path, direct=False)
    demand = Room(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=num_extents)
    volume.reserve(JobId(job), demand)
    volume.close()
    return (1 + num_extents) * UNIT_NBYTES


def test_a_look_finds_buffers_and_states_by_job_and_makes_nothing(settings: Settings) -> None:
    first = settings.ssd_dirs[0]
    assert [ssd.held for ssd in read_capacity(settings).ssds] == [{}, {}]
    assert list(first.iterdir()) == []
    held = put(first, "ftjob-1", 3)
    with_buffers = arena_path(box.ARENA_DIR, JobId("ftjob-2"), Attempt(1))
    arena = Arena.create(with_buffers, 2 * MIB)
    found = read_capacity(settings)
    arena.close()
    assert found.buffers == {"ftjob-2": 2 * MIB}
    assert found.host_nbytes is None  # it was not measured
    assert [ssd.held for ssd in found.ssds] == [{"ftjob-1": held}, {}]
    # Both directories are on one disk.
    assert {ssd.disk for ssd in found.ssds} == {str(first)}
    stats = os.statvfs(first)
    assert found.ssds[0].free_nbytes == pytest.approx(stats.f_bavail * stats.f_frsize, rel=0.2)


def test_unreadable_ssds_have_unknown_capacity(settings: Settings) -> None:
    put(settings.ssd_dirs[0], "ftjob-1", 1)
    settings.ssd_dirs[1].rmdir()
    assert read_capacity(settings).ssds == ()


def test_what_jobs_have_taken_belongs_to_the_box_as_long_as_they_are_on_it() -> None:
    ssds = (
        SsdSpace(disk="/a", free_nbytes=50, held={"on": 30, "paused": 20}),
        SsdSpace(disk="/a", free_nbytes=50, held={"on": 5}),
        SsdSpace(disk="/b", free_nbytes=70),
    )
    found = MachineCapacity(host_nbytes=1000, room_nbytes=100, buffers={"on": 40, "other": 8}, ssds=ssds)
    has = found.has(TWO_GPUS, ["on"])
    assert has == {DEVICES: 2, HOST_MEMORY: 1000, BUFFERS: 140, "/a": 85, "/b": 70}
    demand = Demand(host_nbytes=60, buffers_nbytes=45, ssd_nbytes=90)
    assert found.takes("on", demand) == {DEVICES: 1, HOST_MEMORY: 60, BUFFERS: 45, "/a": 35, "/b": 30}
    assert found.keeps("on", demand) == {"/a": 35, "/b": 30}
    assert found.needs("paused", demand) == {DEVICES: 1, HOST_MEMORY: 60, BUFFERS: 45, "/a": 30, "/b": 30}
    assert found.needs("new", replace(demand, num_devices=2))[DEVICES] == 2
    assert found.needs("new", demand) == {DEVICES: 1, HOST_MEMORY: 60, BUFFERS: 45, "/a": 60, "/b": 30}


def test_states_are_shared_out_as_they_are_striped() -> None:
    ssds = [SsdSpace(disk=f"/{name}", free_nbytes=0, rate=rate) for name, rate in (("a", 4e9), ("b", 1e9))]
    needs = MachineCapacity(room_nbytes=0, ssds=ssds).needs("new", Demand(ssd_nbytes=100))
    assert (needs["/a"], needs["/b"]) == (80, 20)
    ssds[1] = SsdSpace(disk="/b", free_nbytes=0)  # never measured: unknown
    needs = MachineCapacity(room_nbytes=0, ssds=ssds).needs("new", Demand(ssd_nbytes=100))
    assert (needs["/a"], needs["/b"]) == (50, 50)


def test_a_plan_tells_what_a_job_takes() -> None:
    report = PlanReport(feasible=True, reasons=(), peak_gib={"gpu": 4.0, "host": 6.5, "ssd": 20.0})
    plan = JobPlan(report=report, arena_nbytes=5 * GIB)
    of_gpu = demand_of(plan, budget_nbytes=None, is_cpu=False)
    assert of_gpu == Demand(host_nbytes=int(6.5 * GIB), buffers_nbytes=5 * GIB, ssd_nbytes=20 * GIB)
    assert demand_of(plan, budget_nbytes=None, is_cpu=True).host_nbytes == int(10.5 * GIB)
    assert demand_of(plan, num_devices=3, budget_nbytes=None, is_cpu=True).host_nbytes == int(18.5 * GIB)
    from_older_version = JobPlan.from_json({"plan": {"feasible": True, "reasons": []}})
    assert demand_of(from_older_version, budget_nbytes=7, is_cpu=True) == Demand()
    assert demand_of(None, budget_nbytes=None, is_cpu=True) == Demand()
    assert demand_of(None, budget_nbytes=7, is_cpu=True) == Demand(buffers_nbytes=7)


def test_room_for_states_is_that_of_the_ssd_that_is_full_first() -> None:
    ssds = [SsdSpace(disk="a", free_nbytes=300, rate=3e9), SsdSpace(disk="b", free_nbytes=200, rate=1e9)]
    machine = MachineCapacity(room_nbytes=0, ssds=ssds)
    nbytes = machine.states_nbytes()
    assert nbytes is not None
    shares = machine.needs("j", Demand(ssd_nbytes=nbytes))
    assert shares["a"] <= 300
    assert shares["b"] <= 200
    more = machine.needs("j", Demand(ssd_nbytes=nbytes + 8))
    assert more["a"] > 300 or more["b"] > 200


def test_room_for_states_counts_a_disk_of_several_entries_once() -> None:
    ssds = [SsdSpace(disk="a", free_nbytes=300), SsdSpace(disk="a", free_nbytes=300)]
    assert MachineCapacity(room_nbytes=0, ssds=ssds).states_nbytes() == 300
    assert MachineCapacity(room_nbytes=0).states_nbytes() is None, "an SSD cannot be read"
