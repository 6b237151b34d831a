"""Runs plain PyTorch, the peer without offload: `python -m benchmarks.peers.plain_runner FOLDER`"""

import sys
from pathlib import Path

import torch

from benchmarks.peers.peer import decay_groups, load_model, mean_loss, run_steps
from benchmarks.peers.workload import read_workload


def main(folder: Path) -> None:
    """Trains with fp32 masters, a bf16 model and torch's fused AdamW."""
    workload = read_workload(folder)
    torch.set_num_threads(workload.num_threads)
    model = load_model(folder, use_reentrant=False)
    params = list(model.parameters())
    masters = [param.detach().float() for param in params]
    optimizer = torch.optim.AdamW(
        decay_groups(masters, workload.weight_decay),
        lr=workload.learning_rate,
        betas=(workload.beta1, workload.beta2),
        eps=workload.epsilon,
        fused=True,
    )

    def train_step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = mean_loss(model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        return loss.item()

    run_steps(workload, folder, train_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
