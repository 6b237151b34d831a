"""A cache of compiled optimizer kernels: compiled once by a separate process, kept on disk, called without the GIL.

Measured on two cores with PyTorch 2.13 and a warm cache. The library loaded here costs 6 ms and 2 MiB.
`torch.compile` in the process costs 2.5 s and 137 MiB, and `aoti_load_package` 5.5 s and 80 MiB, because both import
the compiler. Both also hold the GIL during a call: another thread waits 10 to 20 ms for a chunk of 32 Mi elements.
Calls through the C interface do not hold it. A call costs 10 us. Compiling takes 10 to 20 s.
"""

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from windlass.engine.optimizer.adam_formulas import Format, encoded
from windlass.storage.files import locked
from windlass.storage.memory import describe_process_end

_LOG = logging.getLogger(__name__)

_COMPILE_DEADLINE_S = 600.0  # timeout of one compilation
_ANNOUNCEMENT = (
    "Compiling the update kernel for this job's number formats, once for each: 10 to 20 s, more on a busy machine"
)
_DIGEST_NBYTES = hashlib.sha256().digest_size
_COMPILER = "compile_kernel"  # never imported here: it imports the compiler
_SOURCES = (_COMPILER, "adam_formulas", "split_states", "stochastic_rounding")


class KernelUnavailable(RuntimeError):
    """No compiled kernel is available here. The message says why."""


class KernelFailed(RuntimeError):
    """A compiled kernel refused its arguments; nothing was updated."""


class CompiledKernel:
    """A kernel in a shared library with AOTInductor's C interface. Only one thread may call it at a time."""

    def __init__(self, library: Path) -> None:
        """Loads the library. Raises OSError if it cannot be loaded."""
        self._library = ctypes.CDLL(str(library))  # CDLL, not PyDLL, because its calls release the GIL
        self._container = ctypes.c_void_p()
        create = self._library.AOTInductorModelContainerCreateWithDevice
        if create(ctypes.byref(self._container), ctypes.c_size_t(1), b"cpu", None) != 0:
            raise OSError(f"{library.name} loads but does not start")
        num_outputs = ctypes.c_size_t()
        self._library.AOTInductorModelContainerGetNumOutputs(self._container, ctypes.byref(num_outputs))
        self._num_outputs = num_outputs.value

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Runs the kernel on flat CPU tensors of equal length and of the compiled dtypes. It checks nothing."""
        handles = _handles(tensors)
        outputs = (ctypes.c_void_p * self._num_outputs)()  # stay empty, because formulas return nothing
        failed = self._library.AOTInductorModelContainerRun(
            self._container,
            handles,
            ctypes.c_size_t(len(handles)),
            outputs,
            ctypes.c_size_t(self._num_outputs),
            None,
            None,
        )
        if failed:
            raise KernelFailed(f"the compiled optimizer kernel failed with code {failed}; see its message on stderr")


def load_kernel(
    kernel: Format, cache_dir: Path | None, announce: Callable[[str], None] | None = None
) -> CompiledKernel:
    """Loads the kernel of a format from the cache. Compiles it first if it is missing or damaged.

    Processes that need the same kernel wait for the one that compiles it. Without `cache_dir` nothing is kept.
    `announce`: is called with a line for the user before a compilation, in the process that compiles.

    Raises:
        KernelUnavailable: there is no compiler, or it failed.
        OSError: the disk is full; a later attempt may succeed.
    """
    if not hasattr(torch._C._aoti, "unsafe_alloc_void_ptrs_from_tensors"):  # it passes tensors to the C interface
        raise KernelUnavailable(f"torch {torch.__version__} cannot hand tensors to compiled kernels")
    if cache_dir is None:
        with tempfile.TemporaryDirectory() as directory:
            return _load_from(kernel, Path(directory), announce)
    make_private(cache_dir)
    return _load_from(kernel, cache_dir, announce)


def _load_from(kernel: Format, cache_dir: Path, announce: Callable[[str], None] | None) -> CompiledKernel:
    path = cache_dir / f"{_key(kernel)}.so"
    if not _is_whole(path):
        with _compilation_lock(path):
            if not _is_whole(path):
                _compile(kernel, path, announce)
    try:
        return CompiledKernel(path)
    except OSError as error:
        raise KernelUnavailable(f"the compiled kernel {path} cannot be loaded: {error}") from error


def _key(kernel: Format) -> str:
    """Returns a hash of all that a library's code depends on."""
    facts = [
        torch.__version__,
        torch.version.git_version,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        _cpu_flags(),
        encoded(kernel),
        *(Path(__file__).with_name(f"{name}.py").read_text() for name in _SOURCES),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _cpu_flags() -> str:
    """Returns the processor's feature flags, because code is compiled for exactly this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _is_whole(path: Path) -> bool:
    """Checks whether the library exists and its last bytes are the digest of the others."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_NBYTES]).digest() == content[-_DIGEST_NBYTES:]


def _compile(kernel: Format, path: Path, announce: Callable[[str], None] | None) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise KernelUnavailable(f"there is no C++ compiler: {compiler} is not on the PATH")
    if announce is not None:
        announce(_ANNOUNCEMENT)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as directory:
        library = Path(directory) / "kernel.so"
        _run_compiler(kernel, library)
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())  # loaders ignore bytes after the end
        library.replace(path)


def _run_compiler(kernel: Format, library: Path) -> None:
    command = [sys.executable, "-m", f"{__package__}.{_COMPILER}", encoded(kernel), str(library)]
    # Without the environment's settings for the compiler, which could change the code or write files elsewhere.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
    environment |= {
        "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes for one kernel
        "TMPDIR": str(library.parent),
        "PYTHONSAFEPATH": "1",
        "LC_ALL": "C.UTF-8",  # because the text of its errors is parsed below
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, text = process.communicate(timeout=_COMPILE_DEADLINE_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the compiler's own processes too
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise KernelUnavailable(f"compiling the optimizer kernel took over {_COMPILE_DEADLINE_S} s") from error
        raise
    if process.returncode != 0 or not library.exists():
        for code in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(code) in text:
                raise OSError(code, os.strerror(code), str(library.parent.parent))
        how = describe_process_end(process.returncode)
        _LOG.warning("what the compiler of the optimizer kernel said:\n%s", text)
        raise KernelUnavailable(f"the compiler of the optimizer kernel {how}: {_first_error(text)}")


def _first_error(text: str) -> str:
    """Returns the line of a compiler's output with the error, because the whole output is too long for an event."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "it said nothing")[:300]


def make_private(directory: Path) -> None:
    """Makes a directory that only its owner can enter, because files in it are executed.

    Raises:
        KernelUnavailable: it belongs to another user.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = directory.stat()
    if facts.st_uid != os.geteuid():
        raise KernelUnavailable(f"the kernel cache {directory} belongs to another user: name a directory of your own")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        directory.chmod(0o700)


@contextmanager
def _compilation_lock(library: Path) -> Iterator[None]:
    """Lets no other process compile the library. The wait has a timeout, because the holder's compilation has one."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(library.with_suffix(".lock"), timeout_s=2 * _COMPILE_DEADLINE_S))
        except TimeoutError as error:
            raise KernelUnavailable(f"{error}: it must be stuck") from None
        yield


def _handles(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Returns handles of tensors. The library's `Run` takes ownership of them and frees them."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return (ctypes.c_void_p * len(capsules))(*(_pointer_of(capsule, None) for capsule in capsules))


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
