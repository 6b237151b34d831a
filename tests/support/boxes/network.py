"""A network of boxes on one machine: namespaces on a bridge, which tests cut, slow down, and switch off."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path

import psutil
import pytest

from tests.support.boxes.namespaces import NamespaceError, Namespaces

_BRIDGE = "boxes"
_RELAY = Path(__file__).with_name("relay.py")
_LATENCY_MS = 200  # that a packet may wait in a shaped link before it is dropped
_MIN_BURST_NBYTES = 16 << 10
_NO_BOX = "02:00:00:00:00:fe"  # a hardware address


class Direction(Flag):
    """The ways of a box's link."""

    OUT = auto()
    IN = auto()
    BOTH = OUT | IN


@dataclass
class _Forward:
    """A listener of the test process whose connections a process passes on to a port of a box."""

    listener: socket.socket
    host: str
    port: int
    _process: "subprocess.Popen[bytes] | None" = None

    def start(self, inside: Namespaces) -> None:
        fd = self.listener.fileno()
        command: list[str | Path] = [sys.executable, "-I", "-S", _RELAY, str(fd), self.host, str(self.port)]
        self._process = subprocess.Popen(inside.network_command(command), stdin=subprocess.DEVNULL, pass_fds=[fd])

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20.0)
            self._process = None


class Box:
    """A box with its own address, host name, pids, /tmp and /dev/shm. Its folder is the same inside and outside."""

    def __init__(self, name: str, folder: Path, address: str, bridge: Namespaces, number: int) -> None:
        self.name = name
        self.folder = folder
        self.address = address
        self._bridge = bridge
        self._port = f"port{number}"
        self._cut = Direction(0)
        self._rate_bits_per_s: float | None = None
        self._numbers = itertools.count(1)
        self._started: list[subprocess.Popen[bytes]] = []
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        self._forwards: list[_Forward] = []
        self._inside: Namespaces | None = None
        self.switch_on()

    @property
    def is_on(self) -> bool:
        """Returns whether the box is switched on."""
        return self._inside is not None

    @property
    def inside(self) -> Namespaces:
        """The namespaces; the box must be on."""
        assert self._inside is not None, f"{self.name} is off"
        return self._inside

    def switch_on(self) -> None:
        """Starts the box, at first or after `switch_off`: same folder, address and link, but no processes."""
        self._inside = Namespaces(self.name, outer=self._bridge, folder=self.folder)
        try:
            self._connect(self._inside)
        except BaseException:
            self.switch_off()
            raise
        for forward in self._forwards:
            forward.start(self._inside)

    def switch_off(self) -> None:
        """Ends the box as a power failure does: no process hears of it, and the others get no answer."""
        for forward in self._forwards:
            forward.stop()
        self.inside.close()
        self._inside = None
        for process in self._started:
            process.wait(20.0)
        self._started.clear()

    def close(self) -> None:
        """Ends the box and its forwarded ports."""
        if self.is_on:
            self.switch_off()
        for forward in self._forwards:
            forward.listener.close()

    @property
    def shared_memory(self) -> Path:
        """The box's /dev/shm, as the test process sees it."""
        return Path(f"/proc/{self.inside.init.pid}/root/dev/shm")

    # --- processes ---

    def start(
        self, *command: str | Path, log: str = "", environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Starts a process in the box's folder. Its output goes to the file `log` there, or to a numbered one.

        The process ends if the handle is killed. Its detached children end with the box only.
        """
        with (self.folder / (log or f"{next(self._numbers)}.log")).open("ab") as file:
            process = subprocess.Popen(
                self.inside.command(command, folder=self.folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment(environment),
            )
        self._started.append(process)
        return process

    def run(
        self, *command: str | Path, environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> "subprocess.CompletedProcess[str]":
        """The exit code and the output of a command in the box's folder.

        The output goes through files, because a detached child keeps a pipe open.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(
                self.inside.command(command, folder=self.folder),
                env=self._environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=timeout_s,
                check=False,
            )
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        return subprocess.CompletedProcess(command, done.returncode, *texts)

    def processes(self) -> list[psutil.Process]:
        """All processes of the box, with the pids that the test process sees."""
        return self.inside.processes()

    def process(self, pid: int) -> psutil.Process:
        """The process that has this pid in the box."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                if _pids_of(process.pid)[-1] == pid:
                    return process
        raise LookupError(f"no process {pid} in {self.name}")

    def kill_all(self) -> None:
        """Kills all processes of the box, which stays on."""
        self.inside.kill_processes()

    def forward(self, port: int, *, host: str = "127.0.0.1") -> int:
        """A port of the test process's 127.0.0.1 that leads to a port of the box, past all links.

        It works again after `switch_off` and `switch_on`; in between, connections wait.
        """
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._forwards.append(_Forward(listener, host, port))
        self._forwards[-1].start(self.inside)
        local: int = listener.getsockname()[1]
        return local

    # --- the link ---

    def cut(self, direction: Direction = Direction.BOTH) -> None:
        """Drops all packets silently, of both ways or of one, as a broken switch does. Connections stay open."""
        self._cut |= direction
        self._set_link()

    def restore(self) -> None:
        """Ends every cut; a rate stays."""
        self._cut = Direction(0)
        self._set_link()

    def part(self, other: "Box") -> None:
        """Drops all packets between this box and another one silently. Both still reach all others."""
        for end, peer in ((self, other), (other, self)):
            # No box has this address, so the frames reach none.
            command = ["ip", "neigh", "replace", peer.address, "lladdr", _NO_BOX, "dev", "eth0", "nud", "permanent"]
            end.inside.run(command)

    def join(self, other: "Box") -> None:
        """Ends `part`."""
        for end, peer in ((self, other), (other, self)):
            end.inside.run(["ip", "neigh", "delete", peer.address, "dev", "eth0"])

    def shape(self, bits_per_s: float | None) -> None:
        """Limits the rate of each way. None: no limit."""
        self._rate_bits_per_s = bits_per_s
        self._set_link()

    def link_nbytes(self) -> tuple[int, int]:
        """The bytes that the box's interface has sent and received, with headers, since the box was switched on."""
        for line in Path(f"/proc/{self.inside.init.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                received, *_, sent = (int(numbers.split()[column]) for column in (0, 8))
                return sent, received
        raise LookupError(f"{self.name} has no link")

    def _connect(self, inside: Namespaces) -> None:
        """Makes the link between the box and the bridge."""
        with contextlib.suppress(NamespaceError):  # the kernel removes the link of an earlier life a little later
            self._bridge.run(["ip", "link", "delete", self._port])
        peer = f"{self._port}b"
        self._bridge.run(["ip", "link", "add", self._port, "type", "veth", "peer", "name", peer])
        # A pid of the bridge's namespace, in which `ip` runs.
        pid = _pid_in(inside.init.pid, self._bridge.init.pid)
        self._bridge.run(["ip", "link", "set", peer, "netns", str(pid), "name", "eth0"])
        self._bridge.run(["ip", "link", "set", self._port, "master", _BRIDGE, "up"])
        inside.run(["ip", "address", "add", f"{self.address}/24", "dev", "eth0"])
        inside.run(["ip", "link", "set", "eth0", "up"])
        self._set_link()

    def _set_link(self) -> None:
        # Each end limits what it sends: the box's own end what goes out, the bridge's end what comes in.
        self._set_queue(self.inside, "eth0", is_cut=Direction.OUT in self._cut)
        self._set_queue(self._bridge, self._port, is_cut=Direction.IN in self._cut)

    def _set_queue(self, end: Namespaces, device: str, *, is_cut: bool) -> None:
        if is_cut:
            queue = ["blackhole"]
        elif self._rate_bits_per_s is not None:
            burst = max(_MIN_BURST_NBYTES, int(self._rate_bits_per_s / 8 / 100))
            rate = f"{self._rate_bits_per_s:.0f}bit"
            queue = ["tbf", "rate", rate, "burst", str(burst), "latency", f"{_LATENCY_MS}ms"]
        else:
            queue = ["pfifo"]
        end.run(["tc", "qdisc", "replace", "dev", device, "root", *queue])

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, "TMPDIR": "/tmp", **(more or {})}


class Network:
    """Boxes on one bridge. All of it ends with `close`, or with the test process even if it is killed.

    It has a namespace of its own, so that networks of several test processes have nothing in common.
    """

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.boxes: dict[str, Box] = {}
        self._bridge = Namespaces("bridge")
        try:
            self._bridge.run(["ip", "link", "add", _BRIDGE, "type", "bridge"])
            self._bridge.run(["ip", "link", "set", _BRIDGE, "up"])
            for number, name in enumerate(names, start=1):
                self.boxes[name] = Box(name, folder / name, f"10.77.0.{number}", self._bridge, number)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Box:
        return self.boxes[name]

    def close(self) -> None:
        """Ends all boxes and the bridge."""
        for box in self.boxes.values():
            box.close()
        self._bridge.close()


@contextlib.contextmanager
def network_or_skip(folder: Path, *names: str) -> Iterator[Network]:
    """A network with boxes of these names; skips the test with the reason where the machine does not allow it."""
    try:
        network = Network(folder, names)
    except NamespaceError as error:
        pytest.skip(f"no boxes of namespaces on this machine: {error}")
    try:
        yield network
    finally:
        network.close()


def _pids_of(pid: int) -> list[int]:
    """The pids of a process in this namespace and in all that it lies in, the outermost first."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(word) for word in line.split()[1:]]
    raise OSError(f"the kernel does not tell the pids of process {pid}")


def _pid_in(pid: int, reference: int) -> int:
    """The pid of a process as process `reference` sees it, whose PID namespace is further out."""
    return _pids_of(pid)[len(_pids_of(reference)) - 1]
