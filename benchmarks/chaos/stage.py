"""An installation for `benchmarks.chaos`, started as a user starts it, with its own disk and database."""

import contextlib
import json
import shutil
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.chaos.disk import fill_disk
from benchmarks.chaos.jobs import NotRightError, is_over, leftovers, processes_of_job, submit_jobs, write_data
from benchmarks.chaos.plan import PROCESSES_OF_JOB, RAY, Injury, Kind
from benchmarks.chaos.record import Record, read_record
from tests.e2e.installation import Installation, free_port, make_tiny_model
from tests.support.postgresql import PostgresServer
from windlass.service.installation import Settings, load_settings
from windlass.service.installation.process_ids import send_signal, wait_until_gone
from windlass.service.machine import RayCluster
from windlass.storage.sql import Database

NUM_STEPS = 80  # steps of a job
_UP_DEADLINE_S = 400.0  # timeout of `windlass up` and `windlass down`
_ARENAS = Path("/dev/shm")


class Stage:
    """An installation, with methods to use it and to injure it. Not thread-safe."""

    def __init__(self, folder: Path, *, server: PostgresServer | None, url: str | None, has_own_disk: bool) -> None:
        """`server` and `url`: a PostgreSQL server and a database on it; None: SQLite."""
        self.folder = folder
        self.has_own_disk = has_own_disk
        self.server = server
        self.installation = Installation(home=folder / "home", port=free_port())
        home = self.installation.home
        home.mkdir(mode=0o700)
        if url is not None:
            (home / "windlass.toml").write_text(f"database_url = {json.dumps(url)}\n")
        self.settings: Settings = load_settings(home)
        self.settings.make_dirs()
        make_tiny_model(self.settings.models_dir / "tiny")
        write_data(folder, NUM_STEPS)
        self.database = Database(self.settings.database_url)
        self._client = httpx.Client(base_url=self.installation.url, timeout=90.0)

    # --- use --------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Starts the service, or starts it again."""
        done = self.installation.run("up", "--detach", timeout_s=_UP_DEADLINE_S)
        if done.returncode != 0:
            raise NotRightError(f"`windlass up` failed: {done.stdout}{done.stderr}")

    def submit(self) -> str:
        """Submits a job and returns its id."""
        (job_id,) = submit_jobs(self.installation.url, self.folder)
        return job_id

    def record(self, job_id: str) -> Record:
        """Reads what the job has reported and produced."""
        return read_record(self.database, self.settings, job_id)

    def wait_until_tidy(self, job_id: str, timeout_s: float = 120.0) -> list[str]:
        """Waits until a job's temporary files are gone. Returns those that remain at the timeout."""
        until_s = time.monotonic() + timeout_s
        while (left := leftovers(self.settings, job_id, _ARENAS)) and time.monotonic() < until_s:
            time.sleep(0.2)
        return left

    def end(self) -> list[str]:
        """Runs `windlass down`. Returns the processes that outlive it."""
        before = [*self.installation.service_processes(), *self.installation.ray_processes()]
        done = self.installation.run("down", timeout_s=_UP_DEADLINE_S)
        problems = [] if done.returncode == 0 else [f"`windlass down` failed: {done.stdout}{done.stderr}"]
        if not wait_until_gone(before, timeout_s=10.0):
            problems += [f"process {each.pid} outlived `windlass down`" for each in before if each.is_alive]
        return problems + [f"process {pid} outlived `windlass down`" for pid in self._processes_of_home()]

    def stop_all(self) -> None:
        """Kills all processes, in any state, and leaves the files."""
        for process in (*self.installation.service_processes(), *self.installation.ray_processes()):
            send_signal(process, signal.SIGKILL)

    def close(self) -> None:
        """Ends everything, in any state."""
        self.stop_all()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.installation.end()
        self._client.close()
        self.database.close()

    # --- injure -----------------------------------------------------------------------------------------------------

    def hurt(self, injury: Injury, job_id: str, job_s: float) -> bool:
        """Carries out an injury, and repairs what does not recover by itself. Returns False if the job had already
        ended.

        `job_s`: duration of an undisturbed job.
        """
        match injury.kind:
            case Kind.SERVICE | Kind.EVERYTHING:
                processes = self.installation.service_processes()
                if injury.kind is Kind.EVERYTHING:
                    processes += self.installation.ray_processes()
                for process in processes:
                    send_signal(process, signal.SIGKILL)
                time.sleep(injury.lasts_s)
                self.up()
                return bool(processes)
            case Kind.API | Kind.DISPATCHER:
                return self._kill_child(injury.kind.lower())
            case Kind.DATABASE_AWAY:
                self._withhold_database(injury.lasts_s)
            case Kind.DATABASE_RESTARTED:
                assert self.server is not None
                self.server.stop()
                time.sleep(injury.lasts_s)
                self.server.start()
            case Kind.FULL_DISK:
                assert self.has_own_disk
                fill_disk(self.folder, injury.lasts_s)
            case kind if kind in RAY:
                return self._kill_part_of_ray(kind)
            case kind:
                assert kind in PROCESSES_OF_JOB
                return self._kill_process_of_job(kind, job_id, injury.later * job_s)
        return True

    def _kill_child(self, role: str) -> bool:
        """Kills a child of the supervisor. Waits for it, because the supervisor may be restarting it."""
        until_s = time.monotonic() + 60.0
        while time.monotonic() < until_s:
            for process in self.installation.service_processes():
                with contextlib.suppress(psutil.Error):
                    if role in psutil.Process(process.pid).cmdline():
                        send_signal(process, signal.SIGKILL)
                        return True
            time.sleep(0.1)
        raise NotRightError(f"there was no {role} for a minute")

    def _kill_part_of_ray(self, name: str) -> bool:
        until_s = time.monotonic() + _UP_DEADLINE_S
        while time.monotonic() < until_s:
            for pid in RayCluster(self.installation.home).pids:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if process.name() == name:
                        process.kill()
                        return True
            time.sleep(0.1)
        raise NotRightError(f"there was no {name} for {_UP_DEADLINE_S:g} s")

    def _kill_process_of_job(self, name: str, job_id: str, later_s: float) -> bool:
        """Kills a process of the job. If it does not exist yet, waits for it and `later_s` more.

        The delay avoids that all such processes die while they start.
        """
        had_to_wait = False
        while not self.is_over(job_id):
            processes = processes_of_job(self.settings, job_id)
            if name in processes and had_to_wait:
                had_to_wait = False
                time.sleep(later_s)
            elif name in processes:
                with contextlib.suppress(psutil.Error):
                    processes[name].kill()
                    return True
            else:
                had_to_wait = True
                time.sleep(0.2)
        return False

    def _withhold_database(self, lasts_s: float) -> None:
        if self.server is not None:
            self.server.pause()
            try:
                time.sleep(lasts_s)
            finally:
                self.server.go_on()
            return
        path = self.settings.database_url.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=60.0)) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(lasts_s)
            other.execute("ROLLBACK")

    # --- observe ----------------------------------------------------------------------------------------------------

    def is_over(self, job_id: str) -> bool:
        """Returns whether the API reports that the job has ended."""
        return is_over(self._client, job_id)

    def _processes_of_home(self) -> list[int]:
        home = str(self.installation.home)
        return [
            process.pid
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get("WINDLASS_HOME") == home
        ]


def copy_kernels(source: Path, target: Path) -> None:
    """Copies compiled kernels between homes, because compiling them takes long."""
    if (source / "kernels").is_dir():
        shutil.copytree(source / "kernels", target / "kernels", dirs_exist_ok=True)
