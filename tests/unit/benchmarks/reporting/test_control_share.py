"""The CPU time that counts as control."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reporting.control_share import _MOVERS, _UPDATERS, Overhead, Role, overhead, role_of
from benchmarks.reporting.pss import ThreadSeconds
from windlass.actors.gpu_worker.device_optimizer import DeviceStates
from windlass.actors.gpu_worker.grad_accumulation import PartialGrads
from windlass.actors.gpu_worker.grad_offload import GradOffload
from windlass.actors.gpu_worker.param_prefetcher import ParamFeed
from windlass.storage.io_scheduler.scheduler import IoScheduler
from windlass.storage.threads import shown_name


def seconds(user_s: float, system_s: float, name: str = "ray::ActorShell") -> ThreadSeconds:
    return ThreadSeconds(user_s, system_s, name)


def test_control_share_counts_each_role_by_its_rule() -> None:
    roles = {1: Role.COMPUTE, 2: Role.SSD, 3: Role.CONTROL}
    before = {(1, 10): seconds(1.0, 0.0), (2, 20): seconds(0.0, 1.0)}
    after = {
        # The two hottest threads of a computing worker are kernels; of the others one copies.
        (1, 10): seconds(9.0, 1.0),
        (1, 11): seconds(7.0, 0.0),
        (1, 12): seconds(0.25, 0.25),
        (1, 13): seconds(2.0, 1.0, "ParamFeed_arriv"),
        # Kernels update the device's states too, in threads of their own.
        (1, 14): seconds(8.0, 1.0, "DeviceStates.ru"),
        # For an SSD server, system time is I/O.
        (2, 20): seconds(0.5, 6.0),
        (2, 21): seconds(4.0, 3.0, "IoScheduler_tra"),
        (3, 30): seconds(0.125, 0.125, "GradOffload"),
        # A process without a role.
        (4, 40): seconds(1.0, 0.0),
    }
    assert overhead(before, after, roles, num_threads=2) == Overhead(0.5 + 0.5 + 0.25 + 1.0, 3.0 + 4.0)


def test_threads_that_move_bytes_or_update_have_these_names() -> None:
    loops = (IoScheduler._run_transfers, ParamFeed._run_arrivals, GradOffload._run, PartialGrads.run)
    assert tuple(map(shown_name, loops)) == _MOVERS
    assert (shown_name(DeviceStates.run),) == _UPDATERS


def test_cpu_time_before_the_measurement_does_not_count() -> None:
    spent = {(3, 30): seconds(5.0, 5.0)}
    assert overhead(spent, spent, {}, num_threads=1) == Overhead(0.0, 0.0)


def test_processes_that_are_no_workers_are_control(tmp_path: Path) -> None:
    assert role_of(os.getpid(), [tmp_path]) is Role.CONTROL
    assert role_of(2**22 + 1, [tmp_path]) is Role.CONTROL


@pytest.mark.parametrize("name", ["ActorShell", "ThrottledShell", "ObservedShell"])
def test_workers_are_told_apart_by_the_store_that_they_hold(tmp_path: Path, name: str) -> None:
    code = "import sys, time; file = open(sys.argv[1]) if sys.argv[1:] else None; print(); time.sleep(600)"
    (tmp_path / "store").touch()
    for arguments, role in (([str(tmp_path / "store")], Role.SSD), ([], Role.COMPUTE)):
        # Ray names a worker after its class instead of its program.
        process = subprocess.Popen(
            [f"ray::{name}", "-c", code, *arguments], executable=sys.executable, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert role_of(process.pid, [tmp_path]) is role
        finally:
            process.kill()
            process.communicate()
