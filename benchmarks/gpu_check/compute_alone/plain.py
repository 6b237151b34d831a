"""Times the same model in plain PyTorch on the same GPU: everything there, activation checkpointing, fused AdamW."""

import gc
import time
from collections.abc import Iterator
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_check.cases import SpeedCase
from benchmarks.peers.plain_runner import plain_step
from benchmarks.peers.workload import Workload, model_config

_NUM_TIMED = 2  # steps, after one to warm up
# Bytes a parameter: bf16 param and gradient, fp32 master, gradient and two moments.
_PARAM_NBYTES = 2 + 2 + 4 * 4
_LOGIT_NBYTES = 2 + 4 + 4  # of a logit and its gradient


def plain_step_s(case: SpeedCase, device: torch.device) -> tuple[float | None, str]:
    """Returns the median seconds of a step, with the largest micro-batches that fit; or None and the reason."""
    free_nbytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 62
    shape = case.shape
    if _PARAM_NBYTES * shape.num_params > free_nbytes:
        return None, "its states do not fit on the GPU"
    for number in _microbatches(case):
        num_tokens = case.num_tokens // number
        if _PARAM_NBYTES * shape.num_params + _LOGIT_NBYTES * num_tokens * shape.vocab > free_nbytes:
            continue
        try:
            return _step_s(case, number, device), f"in {number} micro-batches"
        except torch.OutOfMemoryError:
            pass  # an exception that is handled here would hold the model
        gc.collect()
        torch.cuda.empty_cache()
    return None, "it does not fit on the GPU"


def _microbatches(case: SpeedCase) -> Iterator[int]:
    number = case.num_microbatches
    while number <= case.batch_size:
        yield number
        number *= 2


def _step_s(case: SpeedCase, num_microbatches: int, device: torch.device) -> float:
    workload = Workload(
        shape=case.shape,
        batch_size=case.batch_size,
        sequence_length=case.sequence_length,
        num_warmup_steps=1,
        num_timed_steps=_NUM_TIMED,
        num_threads=1,
        seed=1,
        num_microbatches=num_microbatches,
    )
    with device:
        model = AutoModelForCausalLM.from_config(
            model_config(case.shape, case.sequence_length), dtype=torch.bfloat16
        ).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        tokens = torch.randint(0, case.shape.vocab, (case.batch_size, case.sequence_length + 1))
    step = plain_step(model, workload)
    taken = []
    for _ in range(workload.num_steps):
        start_s = time.perf_counter()
        step(tokens[:, :-1], tokens[:, 1:])  # returns the loss, so the device has finished all but the update
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start_s)
    return median(taken[workload.num_warmup_steps :])
