"""Kernels are compiled once, and kept where no other user can place one."""

import os
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import windlass.engine.optimizer.kernel_cache as kernel_cache
from windlass.engine.optimizer.adam_formulas import Format
from windlass.engine.optimizer.adam_kernel import AdamSettings, OptimizerKernel
from windlass.engine.optimizer.kernel_cache import KernelUnavailable, load_kernel
from windlass.service.installation.process_ids import find_process, wait_until_gone
from windlass.storage.ids import StatePrecision
from windlass.storage.memory.capacity import may_find_room_later

FORMAT = Format(grad=torch.bfloat16, param=torch.bfloat16, states=StatePrecision.FP32, decoupled=True)


@pytest.fixture
def cache_dir(kernel_dir: Path, tmp_path: Path) -> Path:
    """A private copy of a filled cache, without what other tests' processes compile at the moment."""
    unfinished = shutil.ignore_patterns("compiling-*")
    return Path(shutil.copytree(kernel_dir, tmp_path / "kernels", ignore=unfinished))


@pytest.fixture
def compilations(kernel_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Counts compilations, and makes them fast: each copies the library that was compiled before."""
    made: list[Path] = []
    whole = (kernel_dir / f"{kernel_cache._key(FORMAT)}.so").read_bytes()

    def run_compiler(kernel: Format, library: Path) -> None:
        made.append(library)
        time.sleep(0.1)
        library.write_bytes(whole[: -kernel_cache._DIGEST_NBYTES])

    monkeypatch.setattr(kernel_cache, "_run_compiler", run_compiler)
    return made


def works(kernel: kernel_cache.CompiledKernel) -> bool:
    """Returns whether a step with a learning rate of 0 and betas of 0 makes the gradient the mean."""
    grad = torch.randn(100).to(torch.bfloat16)
    exp_avg = torch.zeros(100)
    scalars = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1e-8, 0.0])
    kernel(grad, torch.zeros(100), exp_avg, torch.zeros(100), torch.zeros(100, dtype=torch.bfloat16), scalars)
    return torch.equal(exp_avg, grad.float())


def test_a_kept_kernel_is_not_compiled_again(cache_dir: Path, compilations: list[Path]) -> None:
    assert works(load_kernel(FORMAT, cache_dir))
    assert compilations == []


def test_a_process_with_a_kept_kernel_needs_no_compiler(cache_dir: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from windlass.engine.optimizer.adam_kernel import *\n"
        "from windlass.storage.ids import StatePrecision\n"
        "settings = AdamSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, decoupled=True)\n"
        "kernel = OptimizerKernel(settings, grad_dtype=torch.bfloat16, param_dtype=torch.bfloat16,"
        " state_precision=StatePrecision.FP32, cache_dir=Path(sys.argv[1]))\n"
        "print(kernel.kernel)"
    )
    environment = os.environ | {"CXX": "no-such-compiler"}
    command = [sys.executable, "-c", code, str(cache_dir)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "compiled"


@pytest.mark.parametrize("damage", [lambda whole: whole[:1000], lambda whole: b"", lambda whole: b"\1" + whole[1:]])
def test_a_damaged_kernel_is_compiled_anew(cache_dir: Path, compilations: list[Path], damage) -> None:  # type: ignore[no-untyped-def]
    path = cache_dir / f"{kernel_cache._key(FORMAT)}.so"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert works(load_kernel(FORMAT, cache_dir))
    assert len(compilations) == 1
    assert path.read_bytes() == whole
    assert not list(cache_dir.glob("compiling-*"))


def test_threads_loading_the_same_kernel_compile_once(tmp_path: Path, compilations: list[Path]) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(works(load_kernel(FORMAT, tmp_path / "new")))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 4
    assert len(compilations) == 1


def test_a_compilation_is_announced_before_it_begins(tmp_path: Path, compilations: list[Path]) -> None:
    announced: list[tuple[str, int]] = []
    for _ in range(2):
        load_kernel(FORMAT, tmp_path / "new", lambda text: announced.append((text, len(compilations))))
    ((text, num_compilations),) = announced
    assert text.startswith("Compiling the update kernel for this job's number formats, once for each: a second or two")
    assert num_compilations == 0
    assert len(compilations) == 1


def test_without_a_compiler_nothing_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    announced: list[str] = []
    with pytest.raises(KernelUnavailable):
        load_kernel(FORMAT, tmp_path / "new", announced.append)
    assert announced == []


def test_nothing_is_kept_without_a_directory(compilations: list[Path]) -> None:
    assert works(load_kernel(FORMAT, None))
    assert not compilations[0].parent.parent.exists()


def test_the_cache_is_closed_to_other_users(tmp_path: Path, compilations: list[Path]) -> None:
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o755)
    load_kernel(FORMAT, directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(KernelUnavailable, match="belongs to another user"):
        load_kernel(FORMAT, tmp_path)


@pytest.fixture
def compiler_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that runs in place of the compiler."""
    script = tmp_path / "compiler"
    script.touch(mode=0o700)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_a_compiler_that_is_killed_is_told_of_by_its_signal(tmp_path: Path, compiler_script: Path) -> None:
    compiler_script.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(
        KernelUnavailable, match=r"was killed by signal 9 \(SIGKILL\), most likely because the machine ran"
    ):
        load_kernel(FORMAT, tmp_path / "kernels")


def test_a_compilation_that_fails_is_quoted(tmp_path: Path, compiler_script: Path) -> None:
    compiler_script.write_text("#!/bin/sh\necho out of ideas >&2\nexit 3\n")
    with pytest.raises(KernelUnavailable, match="ended with exit code 3: out of ideas"):
        load_kernel(FORMAT, tmp_path / "kernels")
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".lock"]


def test_a_compilation_that_fails_is_told_by_its_first_error_and_logged_whole(
    tmp_path: Path, compiler_script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler_script.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such type\n  1 | foo\ndone' >&2\nexit 1\n")
    with pytest.raises(KernelUnavailable) as caught:
        load_kernel(FORMAT, tmp_path / "kernels")
    assert str(caught.value).endswith(": x.cpp:1: error: no such type")
    assert "1 | foo" in caplog.text


def test_the_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env {shlex.quote(os.environ.get('CXX', 'g++'))}")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")
    assert works(load_kernel(FORMAT, tmp_path / "kernels"))


def test_a_full_disk_is_no_lack_of_a_compiler(tmp_path: Path, compiler_script: Path) -> None:
    """The job then waits for disk space, and does not train with another kernel."""
    told = "as: cannot write main.o: No space left on device"
    compiler_script.write_text(f'#!/bin/sh\n[ "$LC_ALL" = C.UTF-8 ] && echo "{told}" >&2\nexit 1\n')
    settings = AdamSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, decoupled=True)
    with pytest.raises(OSError, match="No space left on device") as raised:
        OptimizerKernel(
            settings,
            grad_dtype=FORMAT.grad,
            param_dtype=FORMAT.param,
            state_precision=FORMAT.states,
            cache_dir=tmp_path / "kernels",
        )
    assert may_find_room_later(raised.value, attempt=1)
    assert raised.value.filename == str(tmp_path / "kernels")


def test_a_compilation_that_hangs_is_ended_with_all_its_processes(
    tmp_path: Path, compiler_script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    compiler_script.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {pids}\nwait\n")
    monkeypatch.setattr(kernel_cache, "_COMPILE_DEADLINE_S", 3.0)
    with pytest.raises(KernelUnavailable, match=r"took over 3\.0 s"):
        load_kernel(FORMAT, tmp_path / "kernels")
    # All are killed together, but only the compiler itself has been waited for; its children may end a moment later.
    processes = [process for pid in pids.read_text().split() if (process := find_process(int(pid))) is not None]
    assert wait_until_gone(processes, timeout_s=60.0)


def test_other_formats_and_other_processors_have_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        Format(grad=torch.float32, param=torch.bfloat16, states=StatePrecision.FP32, decoupled=True),
        Format(grad=torch.bfloat16, param=None, states=StatePrecision.FP32, decoupled=True),
        Format(grad=torch.bfloat16, param=torch.bfloat16, states=StatePrecision.SPLIT, decoupled=True),
        Format(grad=torch.bfloat16, param=torch.bfloat16, states=StatePrecision.FP32, decoupled=False),
    ]
    keys = {kernel_cache._key(kernel) for kernel in (FORMAT, *others)}
    monkeypatch.setattr(kernel_cache, "_cpu_flags", lambda: "flags: sse2")
    assert len(keys | {kernel_cache._key(FORMAT)}) == 6


def test_another_thread_runs_while_a_kernel_does(cache_dir: Path) -> None:
    """The kernel releases the GIL: the other thread runs during a call that takes far longer."""
    kernel = load_kernel(FORMAT, cache_dir)
    numel = 2**25
    states = [torch.zeros(numel, dtype=dtype) for dtype in FORMAT.operand_dtypes()]
    scalars = torch.tensor([1.0, 1.0, 1.0, 0.1, 0.9, 0.1, 1.0, 1e-8, 1e-3])
    inside, seen = threading.Event(), []
    stopping = threading.Event()

    def watch() -> None:
        while not stopping.is_set():
            seen.append(inside.is_set())
            time.sleep(0.0001)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    thread = threading.Thread(target=watch)
    thread.start()
    interval_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1000.0)  # no thread takes the GIL by force; it must be released
        inside.set()
        for _ in range(3):
            kernel(*states, scalars)
        inside.clear()
    finally:
        sys.setswitchinterval(interval_s)
        stopping.set()
        thread.join()
        torch.set_num_threads(num_threads)
    assert seen.count(True) > 10
