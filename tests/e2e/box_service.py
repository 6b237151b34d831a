"""Installations of windlass on boxes of namespaces: a head, and boxes that work for it."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.installation import Installation, make_tiny_model
from tests.e2e.test_several_gpus import CPU
from tests.pretend_gpus import pretend_gpus
from tests.support.boxes.network import Box, Network, network_or_skip
from windlass.planner.hardware.hardware import Gpus, save_hardware
from windlass.service.installation.settings import HARDWARE_FILE, SETTINGS_FILE

HEAD = "head"
CLUSTER_PORT = 8643
# Seconds. Only a hang takes that long.
DEADLINE_S = 300.0
_API_PORT = 8642
_HOST_MEMORY_GIB = 2
_BOXES_PATH = "/v1/boxes"
_JOBS_PATH = "/v1/fine_tuning/jobs"


@dataclass(frozen=True, kw_only=True)
class BoxInstallation(Installation):
    """The installation on a box. Its commands run there; `port` leads to its API from outside."""

    box: Box
    num_gpus: int = 0  # pretended ones

    @property
    def environment(self) -> dict[str, str]:
        # Compiling kernels takes longer than a test.
        gpus = pretend_gpus(self.num_gpus) if self.num_gpus else {}
        return {**super().environment, **gpus, "WINDLASS_PORT": str(_API_PORT), "CXX": "none"}

    def run(self, *arguments: str, timeout_s: float = 240.0) -> "subprocess.CompletedProcess[str]":
        """The exit code and the output of a command on the box."""
        windlass = Path(sys.executable).with_name("windlass")
        return self.box.run(windlass, *arguments, environment=self.environment, timeout_s=timeout_s)

    def role(self, role: str) -> list[psutil.Process]:
        """The processes of windlass on the box that have this word in their command line."""
        found = []
        for process in self.box.processes():
            try:
                if any(role == word or word.endswith(f"/{role}") for word in process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self, role: str) -> None:
        """Kills the processes of this role, which must be there."""
        found = self.role(role)
        assert found, f"{self.box.name} has no process {role}"
        for process in found:
            process.kill()

    def outer_listeners(self) -> set[tuple[str, int]]:
        """The addresses and ports other than loopback on which programs of the box listen."""
        lines = self.box.inside.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).splitlines()
        listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        found = {(address, int(port, 16)) for address, port in (each.split(":") for each in listening)}
        return {(address, port) for address, port in found if address not in _LOOPBACK}


# As the kernel writes them: 127.0.0.1, ::1, and 127.0.0.1 as an address of IPv6.
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


class BoxService:
    """A head with a tiny model, and boxes that may join it."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.installations = {name: _install(box) for name, box in network.boxes.items()}
        self.head = self.installations[HEAD]
        make_tiny_model(self.head.home / "models" / "tiny")

    def __getitem__(self, name: str) -> BoxInstallation:
        return self.installations[name]

    def declare_gpus(self, name: str, number: int) -> None:
        """Lets a box have so many GPUs, which are pretended, and a profile of them, as if it had been measured.

        They are so slow that the planner uses all. Their processes get a budget of host memory, of which a tiny model
        uses little.
        """
        (self[name].home / SETTINGS_FILE).write_text(f"host_memory_gib = {2 * _HOST_MEMORY_GIB}\n")
        machine = CPU.model_copy(update={"gpus": Gpus(count=number, memory_gib=2.0, tflops=0.001)})
        save_hardware(machine, self[name].home / HARDWARE_FILE)
        self.installations[name] = replace(self[name], num_gpus=number)
        self.head = self[HEAD]

    @property
    def others(self) -> list[str]:
        """The names of all boxes but the head."""
        return [name for name in self.installations if name != HEAD]

    def start_head(self) -> None:
        """Starts the service on the head."""
        self.head.ok("up", "--detach", "--cluster-host", self.network[HEAD].address)

    def new_code(self) -> str:
        """A join code: the longest word of all that the command prints."""
        return max(self.head.ok("node", "code").split(), key=len)

    def join_arguments(self, name: str, code: str) -> list[str]:
        """The command that joins a box."""
        head = f"{self.network[HEAD].address}:{CLUSTER_PORT}"
        # As in the settings that the home has already.
        ssds = [part for number in range(2) for part in ("--ssd", str(self[name].home / f"ssd{number}"))]
        return ["node", "join", "--head", head, "--code", code, *ssds, "--name", name]

    def join(self, *names: str) -> None:
        """Joins boxes, and waits until the head lists them as ready."""
        for name in names:
            self[name].ok(*self.join_arguments(name, self.new_code()), timeout_s=DEADLINE_S)
        for name in names:
            self.await_box(name, "ready")

    def start_again(self, name: str) -> None:
        """Starts the programs of a box that has joined, as its owner does after a power failure."""
        if name == HEAD:
            self.start_head()
        else:
            self[name].ok("up", "--detach")

    def boxes(self) -> dict[str, dict[str, Any]]:
        """The boxes that the head lists, by name."""
        with httpx.Client(base_url=self.head.url, trust_env=False, timeout=30.0) as client:
            listed = client.get(_BOXES_PATH).json()
        return {box["name"]: box for box in listed["data"]}

    def await_box(self, name: str, state: str, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Waits until the head lists a box in a state, and returns the box."""
        deadline = time.monotonic() + timeout_s
        while (box := self.boxes().get(name)) is None or box["state"] != state:
            assert time.monotonic() < deadline, f"{name} is never {state}: {box}{self.logs()}"
            time.sleep(0.2)
        return box

    def submit(self, training_file: Path, *options: str, box: str | None = None) -> str:
        """Submits a job on the head without waiting, and returns its id."""
        where = () if box is None else ("--box", box)
        return self.head.ok("submit", "tiny", str(training_file), *options, *where, "--no-wait")

    def pause(self, job_id: str) -> int:
        """Pauses a job without the time that a command takes, and returns the step that it has reached."""
        with httpx.Client(base_url=self.head.url, trust_env=False, timeout=30.0) as client:
            client.post(f"{_JOBS_PATH}/{job_id}/pause").raise_for_status()
        job = self.await_job(job_id, lambda job: job["status"] == "paused", "paused")
        return int(job["windlass"]["step"])

    def await_job(
        self, job_id: str, reached: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = DEADLINE_S
    ) -> dict[str, Any]:
        """Waits until `reached` is true for the head's row of a job, and returns the job."""
        try:
            return self.head.await_job(job_id, reached, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.logs()}") from None

    def await_step(self, job_id: str, step: int) -> int:
        """Waits until the head knows of this step of a job, and returns the step that the job has reached."""
        job = self.await_job(job_id, lambda job: job["windlass"]["step"] >= step, f"step {step}")
        return int(job["windlass"]["step"])

    def await_success(self, job_id: str) -> dict[str, Any]:
        """Waits for the end of a job, which must be a success."""
        ended = ("succeeded", "failed", "cancelled")
        job = self.await_job(job_id, lambda job: job["status"] in ended, "ended")
        assert job["status"] == "succeeded", f"{job}{self.logs()}"
        return job

    def losses(self, job_id: str) -> list[float]:
        """The training loss of every step of a job, from the head. A step that is missing or twice is an error."""
        with httpx.Client(base_url=self.head.url, trust_env=False, timeout=30.0) as client:
            columns = client.get(f"/v1/fine_tuning/jobs/{job_id}/metrics").json()["data"]
        assert columns["step"] == list(range(1, len(columns["step"]) + 1)), columns["step"]
        losses: list[float] = columns["train_loss"]
        return losses

    def logs(self) -> str:
        """The ends of all logs of all boxes, for a failed test's report."""
        return "".join(f"\n=== {name}{each.logs()}" for name, each in self.installations.items())


@contextmanager
def box_service(folder: Path, *names: str) -> Iterator[BoxService]:
    """A head and boxes of these names, on which nothing runs yet; skips where the machine allows no namespaces."""
    with network_or_skip(folder, HEAD, *names) as network:
        yield BoxService(network)


def _install(box: Box) -> BoxInstallation:
    home = box.folder / "home"
    home.mkdir(mode=0o700)
    # All boxes share this machine's memory.
    (home / SETTINGS_FILE).write_text(f"host_memory_gib = {_HOST_MEMORY_GIB}\n")
    return BoxInstallation(home=home, port=box.forward(_API_PORT), box=box)
