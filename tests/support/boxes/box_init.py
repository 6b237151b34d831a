"""The first process of a namespace: it makes a box, says so, and ends the box when its starter has ended.

Run as a program, with standard input a pipe of the starter, and these arguments: the host name, the folder for /tmp
(empty: no folders of its own), and the folders under /tmp that must stay visible. The kernel kills all processes of a
PID namespace when its first process ends. So a starter that is killed leaves nothing.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

_MS_BIND = 4096
_MS_REC = 16384


def main(hostname: str, tmp: str, *visible: str) -> None:
    """Makes the box, and collects its processes until the starter ends."""
    socket.sethostname(hostname)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if tmp:
        # Posix shared memory, and the files that programs put in /tmp, are not those of other boxes.
        _mount("windlass-box", "/dev/shm", kind="tmpfs")
        _replace_tmp(tmp, visible)
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    print("ready", flush=True)
    while True:
        signal.sigwait({signal.SIGCHLD})
        _collect()


def _replace_tmp(tmp: str, visible: tuple[str, ...]) -> None:
    kept = [(name, os.open(name, os.O_PATH)) for name in visible]
    _mount(tmp, "/tmp", flags=_MS_BIND)
    for name, fd in kept:
        Path(name).mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", name, flags=_MS_BIND | _MS_REC)
        os.close(fd)


def _mount(source: str, target: str, *, kind: str = "", flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}: {os.strerror(ctypes.get_errno())}")


def _end_with_the_starter() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _collect() -> None:
    """Collects the processes that have ended, also those whose parent has ended before."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
