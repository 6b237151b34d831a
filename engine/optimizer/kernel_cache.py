"""A cache of compiled optimizer kernels: adam.cpp, compiled once for each format, and called without the GIL.

Compiling takes 0.4 to 0.7 s on two cores with g++ 12. A library costs 1 MiB of memory, and a call 6 us.
"""

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from windlass.engine.optimizer.adam_formulas import Format
from windlass.storage.files import locked
from windlass.storage.memory import describe_process_end

_LOG = logging.getLogger(__name__)

_COMPILE_DEADLINE_S = 600.0  # timeout of one compilation
_ANNOUNCEMENT = "Compiling the update kernel for this job's number formats, once for each: a second or two"
_DIGEST_NBYTES = hashlib.sha256().digest_size
_SOURCE = Path(__file__).with_name("adam.cpp")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-shared",
    # The results are those of the formulas in plain PyTorch, on each processor: no fused multiply-add.
    "-ffp-contract=off",
    # Nothing reads errno or floating-point exceptions; without this, square roots and choices are not vectorized.
    "-fno-math-errno",
    "-fno-trapping-math",
)
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", None: "none"}


class KernelUnavailable(RuntimeError):
    """No compiled kernel is available here. The message says why."""


class CompiledKernel:
    """A kernel in a shared library, for the format for which it was compiled."""

    def __init__(self, library: Path, kernel: Format) -> None:
        """Loads the library. Raises OSError if it cannot be loaded."""
        self._num_tensors = len(kernel.operand_dtypes())
        self._update = ctypes.CDLL(str(library)).windlass_update  # CDLL, not PyDLL, because its calls release the GIL
        self._update.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        self._update.restype = None

    def __call__(self, *arguments: torch.Tensor) -> None:
        """Updates with the formula's arguments: flat CPU tensors of equal length, then constants. It checks nothing.

        It uses as many threads as the calling thread has set in torch.
        """
        tensors, constants = arguments[: self._num_tensors], arguments[self._num_tensors :]
        pointers = (ctypes.c_void_p * self._num_tensors)(*(tensor.data_ptr() for tensor in tensors))
        scalars, integers = (constant.data_ptr() for constant in (constants[0], constants[-1]))
        self._update(pointers, tensors[0].numel(), scalars, integers, torch.get_num_threads())


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
        return CompiledKernel(path, kernel)
    except OSError as error:
        raise KernelUnavailable(f"the compiled kernel {path} cannot be loaded: {error}") from error


def _key(kernel: Format) -> str:
    """Returns a hash of all that a library's code depends on."""
    facts = [
        _SOURCE.read_text(),
        *_FLAGS,
        *_defines(kernel),
        platform.machine(),
        _cpu_flags(),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


def _defines(kernel: Format) -> list[str]:
    return [
        f"-DGRAD={_TYPES[kernel.grad]}",
        f"-DPARAM={_TYPES[kernel.param]}",
        f"-DSTATES={kernel.states}_states",
        f"-DDECOUPLED={int(kernel.decoupled)}",
    ]


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
    compiler = _compiler()[0]
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


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _run_compiler(kernel: Format, library: Path) -> None:
    command = [*_compiler(), *_FLAGS, *_defines(kernel), str(_SOURCE), "-o", str(library)]
    environment = os.environ | {
        "TMPDIR": str(library.parent),
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
