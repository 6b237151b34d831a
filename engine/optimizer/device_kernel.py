"""Compiles the update inside the process that runs it, for GPUs. `kernel_cache` serves only CPUs.

As far as the compiler's options allow, the results on a GPU equal those on a CPU bit for bit. By default Triton fuses a
multiplication with an addition, divides approximately (`div.full`), and flushes denormal numbers to zero in library
functions. The options below forbid all three.
Source: PyTorch, torch/_inductor/config.py and torch/_inductor/codegen/triton.py.
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
from windlass.storage.memory import is_out_of_space

# Before PyTorch 2.12 the option for division has the misspelt name, and there is none for denormal numbers.
_EXACT = (
    "emulate_precision_casts",  # no fused multiply-add either
    "eager_numerics.division_rounding",
    "emulate_divison_rounding",
    "eager_numerics.disable_ftz",
)
# Elements of the first call, by which the compiler chooses its block sizes. Larger numbers would give the same sizes.
_EXAMPLE_NUMEL = 2**18


def compile_here(kernel: Format, device: torch.device, cache_dir: Path | None) -> Callable[..., None]:
    """Compiles the update for all lengths, and runs it once on a small example, so that errors occur here.

    This takes seconds. The result has the arguments of a `CompiledKernel`, on `device`, and queues work on the current
    stream. `cache_dir`: as for `load_kernel`; the compiler keeps its files there, unless the environment names another
    directory.

    Raises:
        KernelUnavailable: the compiler failed; the message says how.
        OSError: the disk is full; a later attempt may succeed.
    """
    if cache_dir is not None:  # otherwise the compiler uses the temporary directory, which all users share
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
        if is_out_of_space(error):
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
    """Returns a tensor of the same memory with a storage of its own.

    The compiler treats views of one storage, such as a slot, as aliases. It would compare their places at every call,
    and refuse to write to those whose dtype differs from that of their base.
    """
    return torch.utils.dlpack.from_dlpack(tensor)
