"""Compiles one formula into a shared library: `python -m windlass.engine.optimizer.compile_kernel FORMAT LIBRARY`.

It is a separate process, so that the compiler's memory, hundreds of MiB, is freed at its end.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from windlass.engine.optimizer.adam_formulas import Format, Scalar, decoded, formula

_EXAMPLE_NUMEL = 2**16
# Elements: lower limit of a kernel's argument, because the compiler treats shapes of one element specially.
MIN_NUMEL = 2
# Options on which the results depend; they do not rely on the compiler's defaults.
OPTIONS: dict[str, Any] = {
    "cpp.dynamic_threads": True,  # as many threads as the calling thread has set
    "cpp.enable_floating_point_contract_flag": "off",  # no fused multiply-add, in any format
    "cpp.enable_unsafe_math_opt_flag": False,
}
# Disabled, because for one kernel they cost 300 MB, and 6 of 19 s. Some versions of PyTorch lack the option.
_PRECOMPILED_HEADERS = "aot_inductor.precompile_headers"


def compile_library(kernel: Format, path: Path) -> None:
    """Writes the shared library to `path`. Inductor's errors propagate."""
    update = formula(kernel)

    class Update(torch.nn.Module):
        def forward(self, *arguments: torch.Tensor) -> None:
            update(*arguments)

    tensors = [torch.zeros(_EXAMPLE_NUMEL, dtype=dtype) for dtype in kernel.argument_dtypes()]
    constants = [torch.zeros(len(Scalar))]
    if kernel.num_integers:
        constants.append(torch.zeros(kernel.num_integers, dtype=torch.int32))
    arguments = (*tensors, *constants)
    numel = torch.export.Dim("numel", min=MIN_NUMEL, max=2**40)
    shapes = (*({0: numel} for _ in tensors), *({} for _ in constants))
    exported = torch.export.export(Update(), arguments, dynamic_shapes=(shapes,), strict=False)
    options = OPTIONS | {"aot_inductor.output_path": str(path)}
    if _PRECOMPILED_HEADERS in torch._inductor.config.get_config_copy():
        options[_PRECOMPILED_HEADERS] = False
    torch._inductor.aot_compile(exported.module(), arguments, options=options)


def main() -> None:
    """Writes the library of a format to a path, both from the command line."""
    text, path = sys.argv[1:]
    compile_library(decoded(text), Path(path))


if __name__ == "__main__":
    main()
