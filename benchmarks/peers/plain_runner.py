"""Runs plain PyTorch, the peer without offload: `python -m benchmarks.peers.plain_runner FOLDER`"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.peers.peer import decay_groups, load_model, mean_loss, run_steps
from benchmarks.peers.workload import Workload, read_workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plain_step(model: "PreTrainedModel", workload: Workload) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Returns a function that trains a step: fp32 masters of a bf16 model, and torch's fused AdamW."""
    params = list(model.parameters())
    masters = [param.detach().float() for param in params]
    optimizer = torch.optim.AdamW(
        decay_groups(masters, workload.weight_decay),
        lr=workload.learning_rate,
        betas=(workload.beta1, workload.beta2),
        eps=workload.epsilon,
        fused=True,
    )
    num = workload.num_microbatches

    def train_step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        losses = []
        for part, its_targets in zip(inputs.chunk(num), targets.chunk(num), strict=True):
            loss = mean_loss(model, part, its_targets) / num
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        return float(sum(losses))

    return train_step


def main(folder: Path) -> None:
    """Trains the workload of a folder on the CPU."""
    workload = read_workload(folder)
    torch.set_num_threads(workload.num_threads)
    run_steps(workload, folder, plain_step(load_model(folder, use_reentrant=False), workload))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
