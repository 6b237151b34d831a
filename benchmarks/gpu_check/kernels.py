"""Compiles the optimizers' kernel in advance, with a timeout.

`python -m benchmarks.gpu_check.kernels FOLDER STATES GRADIENTS` compiles it. The engine's own compilation has a longer
timeout than this check.
"""

import signal
import subprocess
import sys
from pathlib import Path

import torch

from windlass.engine.optimizer import OptimizerKernel
from windlass.engine.optimizer.adam_kernel import AdamSettings
from windlass.storage.ids import Kernel, StatePrecision

_LIMIT_S = 90.0  # timeout of a compilation
_END_DEADLINE_S = 10.0  # timeout after SIGINT, before SIGKILL
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def prepared_kernel(folder: Path, states: StatePrecision, *, sums_grads: bool) -> Kernel:
    """Returns COMPILED if the folder now has the kernel, else FUSED: there is no compiler, or it takes too long.

    `sums_grads`: gradients are summed over micro-batches, in fp32.
    """
    gradients = "fp32" if sums_grads else "bf16"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.gpu_check.kernels",
        str(folder),
        str(states),
        gradients,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            returncode = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it ends its compiler, which a kill would leave running
            try:
                process.wait(_END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return Kernel.FUSED
    return Kernel.COMPILED if returncode == 0 else Kernel.FUSED


def main(folder: Path, states: StatePrecision, grad_dtype: torch.dtype) -> None:
    """Compiles the kernel for a bf16 model, or finds it in the folder."""
    OptimizerKernel(
        AdamSettings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1, decoupled=True),
        grad_dtype=grad_dtype,
        param_dtype=torch.bfloat16,
        state_precision=states,
        kernel=Kernel.COMPILED,
        cache_dir=folder,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), StatePrecision(sys.argv[2]), _DTYPES[sys.argv[3]])
