"""Measures the head alone: its time, its memory, and the difference of its gradient with each of its kernels.

One micro-batch of bf16 is computed, forward and backward, and added to sums in fp32, as in a job of several.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from benchmarks.gpu_check.case import Setting, in_short
from benchmarks.gpu_check.cases import SHAPES, TINY
from benchmarks.peers.workload import ModelShape, model_config
from windlass.engine.model import BlockRunner, GradBuffer, LossSums, Partition, build_meta_model, kernels_here
from windlass.storage.ids import BlockIndex, ModelKernel, Precision

_KERNELS = (ModelKernel.LIGER_CROSS_ENTROPY, ModelKernel.FP32_PRODUCT)
_NUM_TOKENS = 4096  # of a micro-batch
_NUM_TINY_TOKENS = 64
_NUM_REPEATS = 3  # after one warm-up


def measure_head(setting: Setting) -> dict[str, Any]:
    """Measures a head of 7B with PyTorch's usual kernels, and with every choice of others. A choice fails alone."""
    shape, num_tokens = (TINY, _NUM_TINY_TOKENS) if setting.is_tiny else (SHAPES["7B"], _NUM_TOKENS)
    device = torch.device(setting.device)
    model = build_meta_model(model_config(replace(shape, num_layers=1), num_tokens), Precision.BF16)
    available = [kernel for kernel in kernels_here(model, Precision.BF16, device) if kernel in _KERNELS]
    runs: list[dict[str, Any]] = []
    expected: torch.Tensor | None = None
    for kernels in (chosen for number in range(3) for chosen in combinations(available, number)):
        run: dict[str, Any] = {"kernels": kernels, "grad_difference": None, "reason": ""}
        try:
            head = _Head(shape, kernels, num_tokens, device)
            grad = head.gradient()
            if not kernels:
                expected = grad
            if expected is not None:  # else PyTorch's usual head failed, and there is nothing to compare with
                run["grad_difference"] = float((grad - expected).norm() / expected.norm())
            run |= head.measured()
        except Exception as error:  # noqa: BLE001 - a choice fails alone
            run["reason"] = in_short(error)
        runs.append(run)
    return {"num_tokens": num_tokens, "vocab": shape.vocab, "hidden": shape.hidden, "runs": runs}


class _Head:
    """The head of a model with random weights, hidden states and targets, which are the same for all choices."""

    def __init__(
        self, shape: ModelShape, kernels: Sequence[ModelKernel], num_tokens: int, device: torch.device
    ) -> None:
        config = model_config(replace(shape, num_layers=1, is_tied=False), num_tokens)
        partition = Partition(build_meta_model(config, Precision.BF16))
        self._block: BlockIndex = partition.head
        self._runner = BlockRunner(partition, device, seed=0, kernels=kernels)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)

        numel = partition.layout.blocks[self._block].numel
        self._flat = normal(numel).mul_(0.02)
        self._sums = GradBuffer(torch.empty(numel, device=device))
        self._hidden = normal(1, num_tokens, shape.hidden)
        self._targets = torch.randint(shape.vocab, (1, num_tokens), generator=generator, device=device)

    def gradient(self) -> torch.Tensor:
        """Returns the gradient of all params of one micro-batch, and is the warm-up."""
        self._run()
        return self._sums.flat.clone()

    def measured(self) -> dict[str, Any]:
        """Returns the seconds of further micro-batches, and the peak of the memory that they need themselves."""
        is_gpu = self._flat.is_cuda
        before_nbytes = 0
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
            before_nbytes = torch.cuda.memory_allocated()
        seconds = [self._run() for _ in range(_NUM_REPEATS)]
        peak_nbytes = torch.cuda.max_memory_allocated() - before_nbytes if is_gpu else None
        return {"head_s": seconds, "peak_nbytes": peak_nbytes}

    def _run(self) -> float:
        """Returns the seconds until the device has computed and added a micro-batch."""
        self._runner.inputs = [[self._hidden]]
        self._runner.install(self._block, {self._block: self._flat}, {self._block: self._sums})
        sums = LossSums.nothing(self._targets.numel(), self._flat.device)
        start_s = time.perf_counter()
        self._runner.head(0, [self._targets], sums=sums)
        if self._flat.is_cuda:
            torch.cuda.synchronize()
        took_s = time.perf_counter() - start_s
        self._runner.remove(self._block)
        self._runner.forget()
        return took_s
