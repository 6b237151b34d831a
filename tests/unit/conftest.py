"""Compiled kernels, made once for all tests of a run."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from windlass.engine.kernel_cache import load_kernel
from windlass.engine.optimizer_formulas import Format
from windlass.storage.ids import StatePrecision


@pytest.fixture(scope="session")
def kernel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the AdamW kernels of bf16 models with bf16 gradients, for all three precisions of states.

    The processes of a run share it: `load_kernel` lets one compile while the others wait.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler: {compiler}")
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory /= "kernels"
    formats = [
        Format(grad=torch.bfloat16, param=torch.bfloat16, states=states, decoupled=True) for states in StatePrecision
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda kernel: load_kernel(kernel, directory), formats))
    return directory
