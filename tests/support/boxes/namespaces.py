"""Processes that hold Linux namespaces, and commands that run in them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_INIT = Path(__file__).with_name("box_init.py")
_PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "tc")
_TIE = ["setpriv", "--pdeathsig", "KILL"]
_KINDS = ("--net", "--mount", "--uts", "--pid")
_END_S = 20.0

# The folders that programs in a box need, besides the box's own, even if they lie under /tmp.
_VISIBLE = (Path(__file__).parents[3], Path(sys.prefix), Path(sys.base_prefix))


class NamespaceError(RuntimeError):
    """The machine does not allow the namespaces; the message says what was refused."""


class Namespaces:
    """A first process in new network, mount, PID and host-name namespaces, which end with it.

    Not as root: also in a new user namespace, unless they lie in `outer`, whose user namespace they share.
    """

    def __init__(self, hostname: str, *, outer: "Namespaces | None" = None, folder: Path | None = None) -> None:
        missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
        if missing:
            raise NamespaceError(f"not installed: {', '.join(missing)} (packages util-linux and iproute2)")
        self._is_rootless = os.geteuid() != 0
        user = ["--user", "--map-root-user"] if self._is_rootless and outer is None else []
        command = ["unshare", *user, *_KINDS, "--fork", "--kill-child", "--mount-proc", "--"]
        words = [sys.executable, "-I", "-S", str(_INIT), hostname]
        words += [""] if folder is None else [str(folder / "tmp"), *_visible(folder)]
        command += words
        if outer is not None:
            command = outer.command(command, pdeathsig=False)
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": _path()},
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != b"ready\n":
            said = self._holder.stderr.read().decode().strip().splitlines()
            self._close_pipes()
            self._holder.wait(_END_S)
            raise NamespaceError(f"{' '.join(command[:2])}: {said[-1] if said else 'ended without a word'}")
        # Each program of the chain has one child; the last is the first process of the namespace.
        self.init = psutil.Process(self._holder.pid)
        while children := self.init.children():
            (self.init,) = children
        self._pid_namespace = self._pid_namespace_of(self.init.pid)

    def command(
        self, command: Sequence[str | Path], *, folder: Path | None = None, pdeathsig: bool = True
    ) -> list[str]:
        """The command line that runs `command` in the namespaces, in a folder.

        `pdeathsig`: the process ends with its starter; its own detached children do not.
        """
        tie = _TIE if pdeathsig else []
        move = [] if folder is None else ["env", f"--chdir={folder}"]
        return [*self._enter(*_KINDS), *tie, *move, *map(str, command)]

    def network_command(self, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs `command` in the network namespace only. `processes` does not name the process."""
        return [*self._enter("--net"), *_TIE, *map(str, command)]

    def _enter(self, *kinds: str) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._is_rootless else []
        return ["nsenter", f"--target={self.init.pid}", *user, *kinds, "--"]

    def run(self, command: Sequence[str | Path], *, timeout_s: float = 20.0) -> str:
        """The output of a short command of the system that must succeed."""
        done = subprocess.run(
            self.command(command),
            env={**os.environ, "PATH": _path()},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise NamespaceError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All processes but the first, with the pids that this process sees."""
        return [
            process
            for process in psutil.process_iter()
            if process.pid != self.init.pid and self._pid_namespace_of(process.pid) == self._pid_namespace
        ]

    def kill_processes(self) -> None:
        """Kills all processes but the first, and those that they start meanwhile."""
        until_s = time.monotonic() + _END_S
        while found := self.processes():
            assert time.monotonic() < until_s, f"they do not end: {found}"
            for process in found:
                _kill(process)
            time.sleep(0.01)

    def close(self) -> None:
        """Kills all processes; the kernel then removes the namespaces with their links and mounts."""
        within = self.processes()
        _kill(self.init)
        self._close_pipes()
        self._holder.wait(_END_S)
        psutil.wait_procs(within, _END_S)

    def _close_pipes(self) -> None:
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()

    def _pid_namespace_of(self, pid: int) -> str:
        try:
            return str(Path(f"/proc/{pid}/ns/pid").readlink())
        except OSError:  # it has ended, or belongs to another user
            return ""


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def _path() -> str:
    """The search path with the folders of the system's programs, which users often lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _visible(folder: Path) -> list[str]:
    """The folders under /tmp that a box with its own /tmp needs."""
    wanted = {str(path.resolve()) for path in (folder, *_VISIBLE) if path.resolve().is_relative_to("/tmp")}
    return sorted(wanted)
