"""A head and boxes that work for it, started as their owners start them, with methods to injure them."""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.chaos.jobs import (
    NotRightError,
    is_over,
    leftovers,
    processes_of_job,
    submit_jobs,
    write_data,
)
from benchmarks.chaos.plan import PROCESSES_OF_JOB, Injury, Kind
from benchmarks.chaos.record import Record, read_record
from tests.e2e.box_service import HEAD, BoxService
from tests.support.boxes.network import Network
from windlass.service.installation import Settings, load_settings
from windlass.storage.sql import Database

NUM_STEPS = 40  # steps of a job
_SLOW_BITS_PER_S = 256e3
_UP_DEADLINE_S = 400.0  # timeout of `windlass up` and `windlass down`
_READY_DEADLINE_S = 180.0  # until the head lists a box again whose injury is over
_ROLE_DEADLINE_S = 120.0  # until the supervisor has started a process again that is to be killed
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
_ARENA = "windlass-"  # how the names of our shared memory begin


def names_of(num_boxes: int) -> list[str]:
    """Returns the names of the boxes, the head first."""
    return [HEAD, *(f"box{number}" for number in range(1, num_boxes))]


class BoxStage:
    """Boxes on which all runs take place, one after the other. `hurt` may be called in several threads at once.

    These threads must last as long as the stage, because programs of a box that they start end with them.
    """

    def __init__(self, folder: Path, num_boxes: int) -> None:
        self.folder = folder
        self.names = names_of(num_boxes)
        self._network = Network(folder, tuple(self.names))
        self._service = BoxService(self._network)
        self._settings: dict[str, Settings] = {}
        self._database: Database | None = None
        self._client = httpx.Client(base_url=self.url, timeout=90.0, trust_env=False)
        # Of the processes and of the link of each box. An injury waits for the end of one of the same kind there.
        self._processes = {name: threading.Lock() for name in self.names}
        self._links = {name: threading.Lock() for name in self.names}
        self._power = threading.Lock()
        self._given_up = threading.Event()
        write_data(folder, NUM_STEPS)

    @property
    def url(self) -> str:
        """The address of the head's API."""
        return self._service.head.url

    # --- use ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the head, and joins the boxes."""
        self._service.start_head()
        self._service.join(*self._service.others)
        self._settings = {name: load_settings(self._service[name].home) for name in self.names}
        self._database = Database(self._settings[HEAD].database_url)

    def submit(self, num_jobs: int) -> list[str]:
        """Submits equal jobs, which go to any boxes, and returns their ids."""
        return submit_jobs(self.url, self.folder, num_jobs)

    def record(self, job_id: str) -> Record:
        """Reads what a job has reported and produced, from the head."""
        assert self._database is not None
        return read_record(self._database, self._settings[HEAD], job_id)

    def arenas(self) -> dict[str, list[str]]:
        """Returns the names of windlass's shared memory on each box."""
        found = {}
        with self._power:
            for name in self.names:
                box = self._network[name]
                paths = box.shared_memory.iterdir() if box.is_on else ()
                found[name] = sorted(path.name for path in paths if path.name.startswith(_ARENA))
        return found

    def wait_until_tidy(self, job_ids: Sequence[str], timeout_s: float = _READY_DEADLINE_S) -> list[str]:
        """Waits until the boxes are ready and no more of ended jobs is left than should be. Returns what is left."""
        until_s = time.monotonic() + timeout_s
        while (left := self._untidy(job_ids)) and time.monotonic() < until_s:
            time.sleep(0.5)
        return left

    def _untidy(self, job_ids: Sequence[str]) -> list[str]:
        left = [f"box {name} is {state}" for name, state in self._states().items() if state != "ready"]
        for name in self.names:
            box, home = self._network[name], self._service[name].home
            left += [f"{arena} in /dev/shm of {name}" for arena in self.arenas()[name]]
            left += [f"process {each} of {name}" for each in _processes_of_jobs(box.processes())]
            for job_id in job_ids:
                left += leftovers(self._settings[name], job_id, box.shared_memory)
                if name != HEAD:  # a box keeps nothing of an ended job
                    left += [str(path) for path in home.rglob(f"*{job_id}*")]
        return left

    def _states(self) -> Mapping[str, Any]:
        try:
            listed = self._service.boxes()
        except (httpx.HTTPError, KeyError, ValueError):
            return {HEAD: "not answering"}
        return {name: listed[name]["state"] if name in listed else "not listed" for name in self.names}

    def end(self) -> list[str]:
        """Runs `windlass down` on all boxes. Returns the processes and the shared memory that outlive it."""
        problems = []
        for name in reversed(self.names):
            done = self._service[name].run("down", timeout_s=_UP_DEADLINE_S)
            if done.returncode != 0:
                problems.append(f"`windlass down` on {name} failed: {done.stdout}{done.stderr}")
            box, until_s = self._network[name], time.monotonic() + 10.0
            while (alive := _commands(box.processes())) and time.monotonic() < until_s:
                time.sleep(0.2)
            problems += [f"process {command} outlived `windlass down` on {name}" for command in alive]
            problems += [f"{arena} outlived `windlass down` on {name}" for arena in self.arenas()[name]]
        return problems

    def keep(self, folder: Path) -> None:
        """Copies the homes of all boxes, after their processes were killed."""
        for name in self.names:
            if self._network[name].is_on:
                self._network[name].kill_all()
            home = self._service[name].home
            shutil.copytree(home, folder / name, symlinks=True, ignore_dangling_symlinks=True)

    def give_up(self) -> None:
        """Ends the injuries that wait or last."""
        self._given_up.set()

    def close(self) -> None:
        """Ends everything, in any state."""
        self._client.close()
        if self._database is not None:
            self._database.close()
        self._network.close()

    # --- injure -------------------------------------------------------------------------------------------------------

    def hurt(self, injury: Injury, job_ids: Sequence[str], job_s: float) -> bool:
        """Carries out an injury, and repairs what does not recover by itself. Returns False if all jobs had ended.

        `job_s`: duration of undisturbed jobs.
        """
        box = self._network[injury.box]
        match injury.kind:
            case Kind.CUT | Kind.SLOW:
                with self._links[box.name]:
                    if injury.kind is Kind.CUT:
                        box.cut()
                    else:
                        box.shape(_SLOW_BITS_PER_S)
                    try:
                        self._given_up.wait(injury.lasts_s)
                    finally:
                        box.restore()
                        box.shape(None)
            case Kind.EVERYTHING | Kind.HEAD:
                with self._processes[box.name]:
                    box.kill_all()
                    self._given_up.wait(injury.lasts_s)
                    self._up(box.name)
            case Kind.POWER:
                with self._processes[box.name], self._links[box.name]:
                    with self._power:
                        box.switch_off()
                    self._given_up.wait(injury.lasts_s)
                    with self._power:
                        box.switch_on()
                    self._up(box.name)
            case kind if kind in PROCESSES_OF_JOB:
                return self._kill_process_of_job(injury, job_ids, injury.later * job_s)
            case kind:
                self._kill_role(box.name, kind)
        return True

    def _up(self, name: str) -> None:
        """Starts the programs of a box again, as its owner does."""
        head = ("--cluster-host", self._network[HEAD].address) if name == HEAD else ()
        done = self._service[name].run("up", "--detach", *head, timeout_s=_UP_DEADLINE_S)
        if done.returncode != 0:
            raise NotRightError(f"`windlass up` on {name} failed: {done.stdout}{done.stderr}")

    def _kill_role(self, name: str, kind: Kind) -> None:
        """Kills a process of a box. Waits for it, because the supervisor may be starting it again."""
        until_s = time.monotonic() + _ROLE_DEADLINE_S
        while time.monotonic() < until_s and not self._given_up.is_set():
            with self._processes[name]:
                if found := self._service[name].role(kind):
                    for process in found:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                    return
            time.sleep(0.1)
        raise NotRightError(f"{name} had no {kind} for {_ROLE_DEADLINE_S:g} s")

    def _kill_process_of_job(self, injury: Injury, job_ids: Sequence[str], later_s: float) -> bool:
        """Kills a process of any job on a box. If there is none yet, waits for it and `later_s` more."""
        had_to_wait = False
        while not (self._given_up.is_set() or all(is_over(self._client, job_id) for job_id in job_ids)):
            with self._processes[injury.box]:
                found = list(self._workers(injury, job_ids))
                if found and not had_to_wait:
                    with contextlib.suppress(psutil.Error):
                        found[0].kill()
                        return True
            self._given_up.wait(later_s if found else 0.5)
            had_to_wait = not found
        return False

    def _workers(self, injury: Injury, job_ids: Sequence[str]) -> Iterator[psutil.Process]:
        for job_id in job_ids:
            processes = processes_of_job(self._settings[injury.box], job_id)
            if injury.kind in processes:
                yield processes[injury.kind]


def _processes_of_jobs(processes: Sequence[psutil.Process]) -> list[str]:
    """Returns the processes of Ray's actors. Only jobs have them."""
    return [each for each in _commands(processes) if each.startswith("ray::") and not each.startswith(_RAYS_OWN)]


def _commands(processes: Sequence[psutil.Process]) -> list[str]:
    commands = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline())[:200])
    return commands
