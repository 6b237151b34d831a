"""Trains a small diffusion transformer whose layers' states lie on an SSD: a plain PyTorch loop but for three lines.

python docs/examples/offload_diffusion.py SSD_DIRECTORY [NUM_STEPS]
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import windlass  # line 1


class Block(nn.Module):
    """A transformer layer that the timestep modulates."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(hidden, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        entering = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(entering, entering, entering, need_weights=False)[0]
        out: torch.Tensor = x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return out


class Denoiser(nn.Module):
    """Tells the noise in images of 8 by 8 pixels, cut into patches of 2 by 2."""

    def __init__(self, hidden: int = 128, num_layers: int = 6) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(1, hidden, 2, 2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, hidden))
        self.time = nn.Sequential(nn.Linear(1, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_layers))
        self.out = nn.Linear(hidden, 4)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.position
        condition = self.time(times[:, None])  # requires grad, and is used by every block
        for block in self.blocks:
            x = block(x, condition)
        return F.fold(self.out(x).transpose(1, 2), (8, 8), 2, stride=2)


def main(ssd_dir: str, num_steps: int) -> None:
    """Prints the loss as it falls, and what moved."""
    torch.manual_seed(0)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model, optimizer = windlass.offload(model, optimizer, ssd_dirs=[ssd_dir], clip_norm=1.0, device="cpu")  # line 2
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for step in range(num_steps):
        images = torch.ones(16, 1, 8, 8) * torch.rand(16, 1, 1, 1)
        noise, times = torch.randn_like(images), torch.rand(16)
        mix = times[:, None, None, None]
        loss = F.mse_loss(model((1 - mix) * images + mix * noise, times), noise)
        loss.backward()
        # line 3: no torch.nn.utils.clip_grad_norm_ here
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 5 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {optimizer.grad_norm:.3f}")
    moved = optimizer.statistics
    print(f"from the SSD {moved.ssd_read_nbytes / 2**20:.0f} MiB, to it {moved.ssd_written_nbytes / 2**20:.0f} MiB")
    torch.save(model.state_dict(), f"{ssd_dir}/denoiser.pt")
    optimizer.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)
