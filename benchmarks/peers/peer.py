"""The child's side of a benchmark run: trains the workload and reports each step to the parent."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.workload import BATCHES_FILE, MODEL_DIR, Workload

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Prefix of a message to the parent. All other output of a child comes from libraries.
MARK = "@benchmark "


def emit(event: str, **values: Any) -> None:
    """Sends one event to the parent."""
    print(MARK + json.dumps({"event": event, **values}), flush=True)


def run_steps(workload: Workload, folder: Path, train_step: Callable[["torch.Tensor", "torch.Tensor"], float]) -> None:
    """Runs every step of the workload, `train_step(inputs, targets) -> loss`, and reports its time and loss."""
    import numpy as np
    import torch

    batches = torch.from_numpy(np.load(folder / BATCHES_FILE))
    emit("ready")
    for index in range(workload.num_steps):
        if index == workload.num_warmup_steps:
            emit("timed")
        start_s = time.perf_counter()
        loss = train_step(*batches[index])
        emit("step", index=index, step_s=time.perf_counter() - start_s, loss=loss)
    emit("done")


def load_model(folder: Path, *, use_reentrant: bool) -> "PreTrainedModel":
    """Loads the workload's model in bf16 and training mode, with every layer recomputed in the backward pass."""
    import torch
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / MODEL_DIR, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model.train()


def mean_loss(model: Any, inputs: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
    """Returns the mean cross-entropy over all positions in fp32. `inputs` and `targets` are (batch, sequence)."""
    import torch

    logits = model(input_ids=inputs, use_cache=False).logits  # (batch, sequence, vocab)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def decay_groups(params: list["torch.Tensor"], weight_decay: float) -> list[dict[str, Any]]:
    """Returns AdamW parameter groups: weight decay on matrices, none on norms and biases."""
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
