"""Compiles one formula into a shared library: `python -m windlass.engine.optimizer.compile_kernel FORMAT LIBRARY`.

A process of its own, so that what the compiler takes (hundreds of MiB, and the time to import it) ends with it.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from windlass.engine.optimizer.adam_formulas import Format, Scalar, decoded, formula

_EXAMPLE_NUMEL = 2**16
# Shapes of one element are special to the compiler.
MIN_NUMEL = 2
# What results depend on is said here, not left to defaults.
OPTIONS: dict[str, Any] = {
    "cpp.dynamic_threads": True,  # as many as the calling thread has been given
    "cpp.enable_floating_point_contract_flag": "off",  # no fused multiply-add, in no format
    "cpp.enable_unsafe_math_opt_flag": False,
}
# Not worth their making for one kernel: 300 MB, and 6 of 19 s. Not every version of torch knows the name.
_PRECOMPILED_HEADERS = "aot_inductor.precompile_headers"


def compile_library(kernel: Format, path: Path) -> None:
    """Write the shared library to `path`. Raises what Inductor raises."""
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
    """Write the library of a format to a path."""
    text, path = sys.argv[1:]
    compile_library(decoded(text), Path(path))


if __name__ == "__main__":
    main()
