"""Steps in forked processes have the same limits as freshly started ones, and end with their server."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from windlass.service.installation.process_ids import find_process
from windlass.service.preparation.pipeline import Preparation
from windlass.service.preparation.sandbox.process import (
    PASSED_ON,
    LimitedCommand,
    LimitedProcess,
    ServerEndedError,
    StepServer,
    start_limited,
)
from windlass.service.preparation.steps import PreparationStep

# A step's module: runs the code that it gets.
_MODULE = """
import os, signal, sys, time
imported_by = os.getpid()
def main():
    exec(sys.argv[1], globals())
if __name__ == "__main__":
    main()
"""
_STARTS_THREADS = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

Run = Callable[..., LimitedProcess]
LIMITS: dict[str, Any] = {"cpu_s": 60, "address_space_nbytes": 4 << 30, "memory_nbytes": 1 << 30}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that every process can import."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "a_step.py").write_text(_MODULE)
    (folder / "a_threaded_step.py").write_text(_STARTS_THREADS + _MODULE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder


@pytest.fixture
def server(modules: Path, tmp_path: Path) -> Iterator[StepServer]:
    found = StepServer(["a_step"], tmp_path / "server.log")
    yield found
    found.close()


@pytest.fixture
def run(server: StepServer, tmp_path: Path) -> Iterator[Run]:
    """Lets the server run code; its output goes to a file named `log`."""
    started: list[LimitedProcess] = []

    def run_it(code: str, **limits: Any) -> LimitedProcess:
        started.append(_start(server.start, tmp_path, code, **limits))
        return started[-1]

    yield run_it
    for process in started:
        process.kill()
        with contextlib.suppress(ServerEndedError):
            process.wait()


def _start(start: Any, folder: Path, code: str, *, log: str = "log", **limits: Any) -> LimitedProcess:
    command = (sys.executable, "-m", "a_step", code)
    with (folder / log).open("ab") as file:
        process: LimitedProcess = start(
            LimitedCommand(command=command, home=folder, **{**LIMITS, **limits}),
            file,
        )
    return process


def _wait_until_gone(pid: int) -> None:
    until_s = time.monotonic() + 60
    while find_process(pid) is not None:
        assert time.monotonic() < until_s, "it goes on"
        time.sleep(0.02)


def _pid_told(path: Path) -> int:
    until_s = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < until_s, "nothing was told"
        time.sleep(0.02)
    return int(path.read_text())


_FACTS = """
import json, resource as r
def opened(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
    except OSError:
        return "the list of them"
json.dump({
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "num_arguments": len(sys.argv),
    "oom_score": open("/proc/self/oom_score_adj").read(),
    "limits": [r.getrlimit(limit) for limit in (r.RLIMIT_CPU, r.RLIMIT_AS, r.RLIMIT_CORE, r.RLIMIT_DATA)],
    "stdin": opened(0),
    "sockets": [opened(fd) for fd in os.listdir("/proc/self/fd")].count("socket"),
    "was_forked": imported_by != os.getpid(),
}, open("facts.json", "w"))
"""


def test_a_forked_process_is_as_limited_as_one_of_its_own(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    run("time.sleep(60)")  # other processes must not inherit its link
    facts = tmp_path / "facts.json"
    assert run(_FACTS, cpu_s=7).wait() == 0
    forked = json.loads(facts.read_text())
    facts.unlink()
    assert _start(start_limited, tmp_path, _FACTS, cpu_s=7).wait() == 0
    own = json.loads(facts.read_text())
    assert (forked.pop("was_forked"), own.pop("was_forked")) == (True, False)
    assert "HF_TOKEN" not in forked["environment"]
    assert forked["environment"].pop("OPENBLAS_NUM_THREADS") == "1"
    assert (forked.pop("sockets"), own.pop("sockets")) == (1, 0), "its link, and no other's"
    assert forked == own
    assert forked["environment"]["OMP_WAIT_POLICY"] == "PASSIVE", "as of the workers, whose blocks are measured there"
    assert forked["limits"] == [[7, 12], [4 << 30, 4 << 30], [0, 0], [1 << 30, 1 << 30]]


def test_each_has_its_own_log_and_tells_its_exit_code(run: Run, tmp_path: Path) -> None:
    both = [
        run("print('out'); os.write(2, b'error'); sys.exit(3)", log="first"),
        run("raise KeyError('x')", log="second"),
        run("os.kill(os.getpid(), signal.SIGTERM)", log="third"),
        run("pass", log="fourth"),
    ]
    assert [process.wait() for process in both] == [3, 1, -signal.SIGTERM, 0]
    assert [process.poll() for process in both] == [3, 1, -signal.SIGTERM, 0]
    assert (tmp_path / "first").read_text() == "errorout\n"
    assert "KeyError: 'x'" in (tmp_path / "second").read_text()
    assert (tmp_path / "fourth").read_text() == ""


def test_modules_are_imported_once(run: Run, tmp_path: Path) -> None:
    for log in ("first", "second"):
        assert run("print(imported_by, os.getppid())", log=log).wait() == 0
    told = [(tmp_path / log).read_text().split() for log in ("first", "second")]
    assert told[0] == told[1]
    assert told[0][0] == told[0][1], "the server itself has imported them"


def test_forked_process_is_ended_by_its_cpu_limit(run: Run) -> None:
    assert run("while True: pass", cpu_s=1).wait() == -signal.SIGXCPU


def test_a_process_that_is_killed_is_gone(run: Run, tmp_path: Path) -> None:
    process = run("print(os.getpid(), flush=True); time.sleep(60)")
    pid = _pid_told(tmp_path / "log")
    assert process.poll() is None
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert find_process(pid) is None
    process.kill()
    assert process.poll() == -signal.SIGKILL


_COUNTS = """
count = 0
while True:
    count += 1
    print(count, flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("is_forked", [True, False])
def test_a_process_that_is_halted_stands_still_until_it_may_proceed(
    run: Run, tmp_path: Path, *, is_forked: bool
) -> None:
    process = run(_COUNTS) if is_forked else _start(start_limited, tmp_path, _COUNTS)
    log = tmp_path / "log"

    def wait_for_more(than: int) -> None:
        until_s = time.monotonic() + 60
        while log.stat().st_size <= than or process.pid is None:
            assert process.poll() is None
            assert time.monotonic() < until_s, "it stands still"
            time.sleep(0.01)

    wait_for_more(0)
    assert process.pid is not None
    process.halt()
    until_s = time.monotonic() + 60
    while "State:\tT" not in Path(f"/proc/{process.pid}/status").read_text():
        assert time.monotonic() < until_s, "it goes on"
        time.sleep(0.01)
    size = log.stat().st_size
    time.sleep(0.05)
    assert (log.stat().st_size, process.poll()) == (size, None)
    process.proceed()
    wait_for_more(size)
    process.halt()
    process.kill()
    assert process.wait() == -signal.SIGKILL, "also while it stands still"


def test_one_that_is_killed_before_it_began_is_gone_too(run: Run) -> None:
    process = run("time.sleep(60)")
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_server_that_ends_takes_its_processes_along_and_another_one_serves(
    run: Run, server: StepServer, tmp_path: Path
) -> None:
    process = run("print(os.getpid(), flush=True); time.sleep(60)")
    pid = _pid_told(tmp_path / "log")
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(ServerEndedError):
        process.wait()
    _wait_until_gone(pid)
    assert run("sys.exit(4)").wait() == 4


def test_closing_ends_all(run: Run, server: StepServer, tmp_path: Path) -> None:
    run("print(os.getpid(), flush=True); time.sleep(60)")
    pid = _pid_told(tmp_path / "log")
    server.close()
    _wait_until_gone(pid)
    server.close()


def test_what_the_server_has_not_imported_or_may_not_know_is_started_anew(
    run: Run, server: StepServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    code = "print(os.environ['HF_TOKEN'], imported_by == os.getpid())"
    assert run(code, log="knowing", passed_on=(*PASSED_ON, "HF_TOKEN")).wait() == 0
    assert (tmp_path / "knowing").read_text() == "a secret True\n"
    with (tmp_path / "log").open("ab") as log:
        command = (sys.executable, "-c", "import os; print(os.getppid())")
        assert server.start(LimitedCommand(command=command, home=tmp_path, **LIMITS), log).wait() == 0
    assert (tmp_path / "log").read_text() == f"{os.getpid()}\n"


@pytest.mark.usefixtures("modules")
def test_a_preparation_does_without_its_server(tmp_path: Path) -> None:
    """This server may not fork, because an import has started threads."""
    result = tmp_path / "first.json"
    code = f"open({str(result)!r}, 'w').write('{{\"ok\": true}}')"
    server = StepServer(["a_threaded_step"], tmp_path / "server.log")
    command = (sys.executable, "-m", "a_threaded_step", code)
    for _ in range(2):  # it is not started again for the second
        step = PreparationStep(name="first", command=command, result_path=result, timeout_s=60)
        preparation = Preparation([step], work_dir=tmp_path / "work", start=server.start)
        until_s = time.monotonic() + 60
        while (results := preparation.poll()) is None:
            assert time.monotonic() < until_s, "the preparation did not end"
            time.sleep(0.02)
        assert results == {"first": {"ok": True}}
    server.begin()
    assert (tmp_path / "server.log").read_text().count("cannot fork") == 1
    server.close()


def test_server_imports_no_packages_that_no_step_needs(tmp_path: Path, modules: Path) -> None:
    (modules / "sklearn.py").write_text(_STARTS_THREADS)
    (modules / "a_step.py").write_text("import importlib.util\nfound = importlib.util.find_spec('sklearn')\n" + _MODULE)
    server = StepServer(["a_step"], tmp_path / "server.log")
    assert _start(server.start, tmp_path, "sys.exit(found is not None or imported_by == os.getpid())").wait() == 0
    server.close()


@pytest.mark.usefixtures("modules")
def test_without_room_for_a_server_there_is_none(tmp_path: Path) -> None:
    server = StepServer(["a_step"], tmp_path / "missing" / "server.log")
    assert _start(server.start, tmp_path, "sys.exit(imported_by != os.getpid())").wait() == 0
    server.close()
