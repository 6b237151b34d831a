"""A head and boxes that work for it, started as their owners start them, with methods to injure them."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.chaos.disk import fill_disk, own_disk
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
from tests.e2e.installation import make_tiny_model
from tests.support.boxes.network import Box, Network
from windlass.service.installation import Settings, load_settings
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import PartRepository

# Steps of a job, and of one over all boxes.
_NUM_STEPS, _NUM_STEPS_OF_SPREAD = 40, 24
# Attempts in a row that may be lost without a step before a job over all boxes fails: injuries come close together.
_MAX_ATTEMPTS = 20
_SLOW_BITS_PER_S = 256e3
_UP_DEADLINE_S = 400.0  # timeout of `windlass up` and `windlass down`
_READY_DEADLINE_S = 180.0  # until the head lists a box again whose injury is over
_ROLE_DEADLINE_S = 120.0  # until the supervisor has started a process again that is to be killed
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
_ARENA = "windlass-"  # how the names of our shared memory begin


def names_of(num_boxes: int) -> list[str]:
    """Returns the names of the boxes, the head first."""
    return [HEAD, *(f"box{number}" for number in range(1, num_boxes))]


def num_steps_of(*, is_spread: bool) -> int:
    """Returns the steps of each job. `is_spread`: it takes all boxes."""
    return _NUM_STEPS_OF_SPREAD if is_spread else _NUM_STEPS


class BoxStage:
    """Boxes on which all runs take place, one after the other. `hurt` may be called in several threads at once.

    These threads must last as long as the stage, because programs of a box that they start end with them.
    """

    def __init__(self, folder: Path, num_boxes: int, *, is_spread: bool = False, fills_disks: bool = False) -> None:
        """`is_spread`: each job takes all boxes. `fills_disks`: each box has a disk of its own, which may be filled."""
        self.folder = folder
        self.names = names_of(num_boxes)
        self.is_spread = is_spread
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as failed:
            failed.callback(self._resources.close)
            for name in self.names if fills_disks else ():
                self._resources.enter_context(own_disk(folder / name))
            self._network = Network(folder, tuple(self.names))
            self._resources.callback(self._network.close)
            failed.pop_all()
        self._service = BoxService(self._network)
        if is_spread:
            with (self._service.head.home / "windlass.toml").open("a") as file:
                file.write(f"max_attempts = {_MAX_ATTEMPTS}\n")
        # Each box needs a layer.
        make_tiny_model(self._service.head.home / "models" / "tiny", num_layers=max(2, num_boxes))
        self._settings: dict[str, Settings] = {}
        self._databases: dict[str, Database] = {}
        self._client = httpx.Client(base_url=self.url, timeout=90.0, trust_env=False)
        # Of the processes and of the link of each box. An injury waits for the end of one of the same kind there.
        self._processes = {name: threading.Lock() for name in self.names}
        self._links = {name: threading.Lock() for name in self.names}
        self._power = threading.Lock()
        self._requests = threading.Lock()  # of the user to pause the job, or to drain a box
        self._given_up = threading.Event()
        self.num_steps = num_steps_of(is_spread=is_spread)
        write_data(folder, self.num_steps)

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
        self._databases = {name: Database(self._settings[name].database_url) for name in self.names}

    def submit(self, num_jobs: int) -> list[str]:
        """Submits equal jobs, which go to any boxes, or take all of them. Returns their ids."""
        return submit_jobs(self.url, self.folder, num_jobs, num_boxes=len(self.names) if self.is_spread else 1)

    def record(self, job_id: str) -> Record:
        """Reads what a job has reported and produced, from the head."""
        return read_record(self._databases[HEAD], self._settings[HEAD], job_id)

    def arenas(self) -> dict[str, list[str]]:
        """Returns the names of windlass's shared memory on each box."""
        found = {}
        with self._power:
            for name in self.names:
                box = self._network[name]
                paths = box.shared_memory.iterdir() if box.is_on else ()
                found[name] = sorted(path.name for path in paths if path.name.startswith(_ARENA))
        return found

    def living_attempts(self, job_id: str) -> dict[str, list[int]]:
        """Returns the attempts of a job of which processes live, by box."""
        locked = {line.split()[5] for line in Path("/proc/locks").read_text().splitlines() if "->" not in line}
        found = {}
        for name, settings in self._settings.items():
            paths = (settings.jobs_dir / job_id).glob("attempt-*.lock")
            found[name] = [int(path.stem.partition("-")[2]) for path in paths if _lock_id(path) in locked]
        return {name: attempts for name, attempts in found.items() if attempts}

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
            with self._databases[name].read() as session:
                parts = PartRepository(session).by_job()
            left += [f"a part of {job_id} in the database of {name}" for job_id in job_ids if job_id in parts]
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
        for database in self._databases.values():
            database.close()
        self._resources.close()

    # --- injure -------------------------------------------------------------------------------------------------------

    def hurt(self, injury: Injury, job_ids: Sequence[str], job_s: float) -> float | None:
        """Carries out an injury, and repairs what does not recover by itself.

        `job_s`: duration of undisturbed jobs. Returns the moment of the injury by the monotonic clock. None: all jobs
        had ended.
        """
        box = self._network[injury.box]
        match injury.kind:
            case Kind.CUT | Kind.SLOW | Kind.APART:
                return self._hurt_link(box, injury)
            case Kind.EVERYTHING | Kind.HEAD | Kind.STOPPED | Kind.FULL_DISK:
                with self._processes[box.name]:
                    came_s = time.monotonic()
                    if injury.kind is Kind.STOPPED:
                        self._stop(box, injury.lasts_s)
                    elif injury.kind is Kind.FULL_DISK:
                        fill_disk(box.folder, injury.lasts_s, self._given_up.wait)
                    else:
                        box.kill_all()
                        self._given_up.wait(injury.lasts_s)
                        self._up(box.name)
            case Kind.POWER:
                with self._processes[box.name], self._links[box.name]:
                    came_s = time.monotonic()
                    with self._power:
                        box.switch_off()
                    self._given_up.wait(injury.lasts_s)
                    with self._power:
                        box.switch_on()
                    self._up(box.name)
            case Kind.PAUSED:
                (job_id,) = job_ids
                return self._request(f"/v1/fine_tuning/jobs/{job_id}", "pause", injury.lasts_s, job_ids)
            case Kind.DRAINED:
                return self._request(f"/v1/boxes/{box.name}", "drain", injury.lasts_s, job_ids)
            case kind if kind in PROCESSES_OF_JOB:
                return self._kill_process_of_job(injury, job_ids, injury.later * job_s)
            case Kind.SERVICE:
                came_s = self._kill_role(box.name, "supervisor")
                with self._processes[box.name]:
                    self._given_up.wait(injury.lasts_s)
                    self._up(box.name)
            case kind:
                came_s = self._kill_role(box.name, kind)
        return came_s

    def _hurt_link(self, box: Box, injury: Injury) -> float:
        boxes = list(self._network.boxes.values())
        hurt = [box]
        if injury.kind is Kind.APART:
            hurt.append(boxes[(boxes.index(box) + 1) % len(boxes)])
        with contextlib.ExitStack() as locks:
            for each in sorted(hurt, key=boxes.index):  # one order, so that no two injuries wait for each other
                locks.enter_context(self._links[each.name])
            came_s = time.monotonic()
            if injury.kind is Kind.CUT:
                box.cut()
            elif injury.kind is Kind.APART:
                box.part(hurt[1])
            else:
                box.shape(_SLOW_BITS_PER_S)
            try:
                self._given_up.wait(injury.lasts_s)
            finally:
                if injury.kind is Kind.APART:
                    box.join(hurt[1])
                else:
                    box.restore()
                    box.shape(None)
        return came_s

    def _stop(self, box: Box, lasts_s: float) -> None:
        stopped = box.processes()
        try:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            self._given_up.wait(lasts_s)
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def _request(self, path: str, what: str, lasts_s: float, job_ids: Sequence[str]) -> float | None:
        """Asks the head to pause or drain, and later to resume. Repeats what it refuses or does not answer."""
        with self._requests:
            came_s = self._ask(f"{path}/{what}", job_ids)
            if came_s is not None:
                self._given_up.wait(lasts_s)
            if came_s is not None or what == "drain":  # a drained box is resumed whatever the jobs do
                self._ask(f"{path}/resume", () if what == "drain" else job_ids)
        return came_s

    def _ask(self, path: str, job_ids: Sequence[str]) -> float | None:
        until_s = time.monotonic() + _UP_DEADLINE_S
        while time.monotonic() < until_s and not self._given_up.is_set():
            if job_ids and all(is_over(self._client, job_id) for job_id in job_ids):
                return None
            with contextlib.suppress(httpx.TransportError):
                if self._client.post(path).is_success:
                    return time.monotonic()
            self._given_up.wait(0.5)
        raise NotRightError(f"the head did not accept POST {path} for {_UP_DEADLINE_S:g} s")

    def _up(self, name: str) -> None:
        """Starts the programs of a box again, as its owner does."""
        head = ("--cluster-host", self._network[HEAD].address) if name == HEAD else ()
        done = self._service[name].run("up", "--detach", *head, timeout_s=_UP_DEADLINE_S)
        if done.returncode != 0:
            raise NotRightError(f"`windlass up` on {name} failed: {done.stdout}{done.stderr}")

    def _kill_role(self, name: str, role: str) -> float:
        """Kills a process of a box. Waits for it, because the supervisor may be starting it again."""
        until_s = time.monotonic() + _ROLE_DEADLINE_S
        while time.monotonic() < until_s and not self._given_up.is_set():
            with self._processes[name]:
                if found := self._service[name].role(role):
                    for process in found:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                    return time.monotonic()
            time.sleep(0.1)
        raise NotRightError(f"{name} had no {role} for {_ROLE_DEADLINE_S:g} s")

    def _kill_process_of_job(self, injury: Injury, job_ids: Sequence[str], later_s: float) -> float | None:
        """Kills a process of any job on a box. If there is none yet, waits for it and `later_s` more."""
        had_to_wait = False
        while not (self._given_up.is_set() or all(is_over(self._client, job_id) for job_id in job_ids)):
            with self._processes[injury.box]:
                found = list(self._workers(injury, job_ids))
                if found and not had_to_wait:
                    with contextlib.suppress(psutil.Error):
                        found[0].kill()
                        return time.monotonic()
            self._given_up.wait(later_s if found else 0.5)
            had_to_wait = not found
        return None

    def _workers(self, injury: Injury, job_ids: Sequence[str]) -> Iterator[psutil.Process]:
        for job_id in job_ids:
            processes = processes_of_job(self._settings[injury.box], job_id)
            if injury.kind in processes:
                yield processes[injury.kind]


def _lock_id(path: Path) -> str:
    """Returns the name of a file in /proc/locks."""
    try:
        found = path.stat()
    except FileNotFoundError:  # the attempt has just been closed
        return ""
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"


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
