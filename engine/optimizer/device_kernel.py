"""The update compiled inside the process that runs it, for GPUs, where `kernel_cache` has nothing to keep.

What it does on a GPU is what a CPU does, bit for bit, as far as the compiler's options go. By default Triton fuses a
multiplication with an addition, divides approximately (`div.full`), and takes denormal numbers for zeros in library
functions; the options below forbid all three.
Source of what they do: PyTorch, torch/_inductor/config.py and torch/_inductor/codegen/triton.py.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor.config
import torch.utils.dlpack

from windlass.engine.optimizer.adam_formulas import Format, Scalar, formula
from windlass.engine.optimizer.kernel_cache import KernelUnavailable, make_private
from windlass.storage.memory import is_for_want_of_room

# Division has another name before torch 2.12 (so misspelt), and denormal numbers none.
_EXACT = (
    "emulate_precision_casts",  # no fused multiply-add either
    "eager_numerics.division_rounding",
    "emulate_divison_rounding",
    "eager_numerics.disable_ftz",
)
# The compiler chooses its block sizes by the first call; every larger number of elements would get the same.
_EXAMPLE_NUMEL = 2**18


def compile_here(kernel: Format, device: torch.device, cache_dir: Path | None) -> Callable[..., None]:
    """Compile for all lengths, and run once on a small example, so that what fails does so now.

    Takes seconds. The result takes what a `CompiledKernel` takes, on `device`, and starts work on the current stream.
    `cache_dir`: as of `load_kernel`; the compiler of this process keeps its files there, unless the environment names
    another place.

    Raises:
        KernelUnavailable: the compiler failed; the text says how.
        OSError: the disk is full, so that it may be had later.
    """
    if cache_dir is not None:  # else it is the temporary directory, which all users share
        make_private(cache_dir)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir / "inductor"))
    known = torch._inductor.config.get_config_copy()
    options: dict[str, str | int | bool | Callable[..., object]] = {name: True for name in _EXACT if name in known}
    options["compile_threads"] = 1  # no pool of processes for one kernel
    compiled = torch.compile(formula(kernel), dynamic=True, fullgraph=True, options=options)

    def run(*tensors: torch.Tensor) -> None:
        compiled(*map(_alone, tensors))

    try:
        run(*_example(kernel, device))
    except Exception as error:  # whatever Dynamo, Inductor, Triton and the driver raise
        if is_for_want_of_room(error):
            raise OSError(errno.ENOSPC, f"no room to compile the optimizer kernel for {device}") from error
        raise KernelUnavailable(f"compiling the optimizer kernel for {device} failed: {error}") from error
    return run


def _example(kernel: Format, device: torch.device) -> list[torch.Tensor]:
    tensors = [torch.zeros(_EXAMPLE_NUMEL, dtype=dtype, device=device) for dtype in kernel.argument_dtypes()]
    tensors.append(torch.zeros(len(Scalar), device=device))
    if kernel.num_integers:
        tensors.append(torch.zeros(kernel.num_integers, dtype=torch.int32, device=device))
    return tensors


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own.

    Views of one slot would all be tensors of one storage, which the compiler takes for aliases of each other: it would
    compare their places at every call, and refuse to write to those that read their base as another type.
    """
    return torch.utils.dlpack.from_dlpack(tensor)
