"""Registers host memory with CUDA, so that the host does not wait for copies from and to it.

Large memory is registered in parts: drivers from version 580 on refuse a registration of 512 GiB or more. CUDA also
refuses a copy that touches two registrations, so copies are cut at the end of each part.
Sources: NVIDIA/open-gpu-kernel-modules, pull request 1234; sgl-project/sglang, pull request 36798.
"""

import bisect
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from windlass.amounts import bytes_text

PART_NBYTES = 64 * 2**30  # of one registration; the driver needs 16 bytes of its own memory for each 4 KiB

_lock = threading.Lock()
# Sorted addresses at which one part of this process ends and the next begins. It is replaced, never changed, so that
# copies read it without the lock.
_cuts: tuple[int, ...] = ()


class PinError(RuntimeError):
    """Host memory could not be registered with CUDA, or is not registered."""


def register(memory: torch.Tensor) -> None:
    """Registers flat memory at its exact size, because PyTorch's pinned allocator would round it up.

    Raises:
        PinError: CUDA refuses; nothing stays registered.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    registered: list[int] = []
    for start, stop in _parts(memory):
        # An enum of CUDA. `cudaGetErrorString` accepts no int.
        status = runtime.cudaHostRegister(start, stop - start, 0)
        if int(status) != 0:
            for address in reversed(registered):
                runtime.cudaHostUnregister(address)
            raise PinError(
                f"CUDA did not register {bytes_text(memory.nbytes)} of host memory: error {int(status)}, "
                f"{runtime.cudaGetErrorString(status)}; lower the job's host memory budget"
            )
        registered.append(start)
    _change_cuts(add=registered[1:])


def unregister(memory: torch.Tensor) -> bool:
    """Undoes `register`. Returns False if CUDA refuses after an earlier error; then the memory must stay mapped."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    starts = [start for start, _ in _parts(memory)]
    refused = [start for start in starts if int(runtime.cudaHostUnregister(start)) != 0]
    if refused:
        return False
    _change_cuts(remove=starts[1:])
    return True


def within_parts(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields pairs of equal pieces of two flat tensors, one of them on the host, so that each is within one part."""
    host = target if target.device.type == "cpu" else source
    start = host.data_ptr()
    cuts = registration_cuts(start, start + host.nbytes)
    if not cuts:
        yield target, source
        return
    bounds = [0, *((cut - start) // host.itemsize for cut in cuts), host.numel()]
    for begin, end in itertools.pairwise(bounds):
        yield target[begin:end], source[begin:end]


def registration_cuts(start: int, stop: int) -> tuple[int, ...]:
    """Returns the addresses between two others at which one part of registered memory ends and the next begins."""
    cuts = _cuts
    return cuts[bisect.bisect_right(cuts, start) : bisect.bisect_left(cuts, stop)]


def _change_cuts(*, add: Sequence[int] = (), remove: Sequence[int] = ()) -> None:
    global _cuts
    with _lock:
        _cuts = tuple(sorted({*_cuts, *add} - {*remove}))


def _parts(memory: torch.Tensor) -> list[tuple[int, int]]:
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    return [(start, min(start + PART_NBYTES, end)) for start in range(begin, end, PART_NBYTES)]
