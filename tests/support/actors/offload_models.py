"""Small models in the usual style of PyTorch code, and the plain loop that offloaded training must agree with.

Shapes: B examples, T tokens, H hidden, C channels of an image of S by S pixels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import windlass
from tests.support.training import has_direct_io, keep_calibration
from windlass.actors.offload.optimizer import OffloadedOptimizer
from windlass.engine.optimizer.adam_formulas import AdamSettings
from windlass.engine.optimizer.adam_kernel import ChunkStates, OptimizerKernel
from windlass.engine.optimizer.grad_norm import squared_norm
from windlass.storage.ids import Kernel, StatePrecision

VOCABULARY, HIDDEN, NUM_LAYERS = 64, 64, 4
# Gives several chunks a layer, the last of which is short.
CHUNK_NUMEL = 8192


class GptLayer(nn.Module):
    """Attention and an MLP, each after a norm. Returns a tuple, as the layers of many models do."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)

    def forward(self, x: torch.Tensor, *, options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=options["mask"]).squeeze(1)
        x = x + self.dropout(self.out(attended)) * self.scale
        return x + self.dropout(self.mlp(self.norm2(x))), options


class Gpt(nn.Module):
    """A GPT whose embedding and head share one weight, outside of the layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(GptLayer(dropout) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        options = {"mask": torch.ones(2 * ids.shape[1:], dtype=torch.bool, device=ids.device).tril(), "name": "causal"}
        for layer in self.layers:
            x, options = layer(x, options=options)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class DitLayer(nn.Module):
    """Modulated by the conditioning (adaLN-Zero). Source: Peebles and Xie, Scalable Diffusion Models, figure 3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(HIDDEN, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, 6 * HIDDEN))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        entering = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(entering, entering, entering, need_weights=False)[0]
        out: torch.Tensor = x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return out


class Dit(nn.Module):
    """Predicts the noise of (B, C, S, S) images; timestep and label embeddings condition every layer."""

    def __init__(self, channels: int = 4, size: int = 8, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.patchify = nn.Conv2d(channels, HIDDEN, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, HIDDEN))
        self.time = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.label = nn.Embedding(10, HIDDEN)
        self.blocks = nn.ModuleList(DitLayer() for _ in range(NUM_LAYERS))
        self.out = nn.Linear(HIDDEN, channels * patch * patch)

    def forward(self, images: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.position  # (B, T, H)
        angles = times[:, None] * torch.exp(-torch.arange(HIDDEN // 2) / 4.0)
        waves = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        condition = self.time(waves) + self.label(labels)  # (B, H), requires grad
        for block in self.blocks:
            x = block(x, condition)
        return F.fold(self.out(x).transpose(1, 2), images.shape[-2:], self.patch, stride=self.patch)


def gpt_loss(model: nn.Module, step: int) -> torch.Tensor:
    """The loss of a batch that depends only on the step."""
    ids = torch.randint(0, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(step))
    returned = model(ids[:, :-1])
    logits = returned if isinstance(returned, torch.Tensor) else returned.logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def dit_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Mean squared error of the predicted noise."""
    generator = torch.Generator().manual_seed(step)
    noise, images = torch.randn(2, 3, 4, 8, 8, generator=generator)
    times = torch.rand(3, generator=generator)
    labels = torch.randint(0, 10, (3,), generator=generator)
    noisy = (1 - times)[:, None, None, None] * images + times[:, None, None, None] * noise
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(noisy.to(dtype), 1000 * times, labels).float(), noise)


class PlainAdam:
    """The update of offloaded training on a whole model in memory: fp32 masters, torch's fused kernel.

    Clipping scales gradients in their own precision, as torch does, or in fp32 with `scales_in_fp32`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, clip_norm: float | None, *, scales_in_fp32: bool = False
    ) -> None:
        self._scales_in_fp32 = scales_in_fp32
        self._grad_scale = 1.0
        self.param_groups = optimizer.param_groups
        self.clip_norm = clip_norm
        self._states: dict[nn.Parameter, ChunkStates] = {}
        self._steps: dict[nn.Parameter, int] = {}
        self.grad_norm: float | None = None

    def step(self) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if self.clip_norm is not None:
            # An fp64 norm: where a gradient is only rounding noise, Adam turns a last-bit change of the scale into a
            # large one.
            norm = torch.sqrt(sum(squared_norm(param.grad.reshape(-1)) for param in params))
            if self._scales_in_fp32:
                self._grad_scale = min(1.0, self.clip_norm / (float(norm) + 1e-6))
            else:
                nn.utils.clip_grads_with_norm_(params, self.clip_norm, norm)
            self.grad_norm = float(norm)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def _update(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        is_fp32 = param.dtype is torch.float32
        flat = param.detach().view(-1)
        if param not in self._states:
            master = flat if is_fp32 else flat.float()
            moments = [torch.zeros(param.numel()) for _ in range(2)]
            low = None if is_fp32 else flat
            self._states[param] = ChunkStates(
                grad=flat, param=low, master=master, exp_avg=moments[0], exp_avg_sq=moments[1]
            )
        self._steps[param] = self._steps.get(param, 0) + 1
        states = self._states[param]
        states.grad = param.grad.reshape(-1).contiguous()
        beta1, beta2 = group["betas"]
        decoupled = group["decoupled_weight_decay"]
        OptimizerKernel(
            AdamSettings(
                beta1=beta1, beta2=beta2, epsilon=group["eps"], weight_decay=group["weight_decay"], decoupled=decoupled
            ),
            grad_dtype=param.dtype,
            param_dtype=None if is_fp32 else param.dtype,
            state_precision=StatePrecision.FP32,
            kernel=Kernel.FUSED,
        ).update(
            states,
            learning_rate=group["lr"],
            step=self._steps[param],
            grad_scale=self._grad_scale,
            decay_numel=param.numel(),
        )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only and a higher learning rate for vectors: two groups in every layer."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
            {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
        ],
        lr=1e-3,
    )


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with the same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().to(dtype)


@contextmanager
def offloaded(
    model: nn.Module, directory: Path, *, num_ssds: int = 2, **options: Any
) -> Iterator[tuple[nn.Module, OffloadedOptimizer]]:
    """A model in training, on SSD directories below `directory`. Released buffers are filled with NaN."""
    ssd_dirs = [directory / f"ssd{i}" for i in range(num_ssds)]
    for ssd_dir in ssd_dirs:
        keep_calibration(ssd_dir)
    settings = {
        "kernel": "fused",
        "chunk_numel": CHUNK_NUMEL,
        "optimizer_threads": 1,
        "deadline_s": 60.0,
        "device": "cpu",
        "direct_io": has_direct_io(directory),
        "poison_released": True,
        **options,
    }
    make_optimizer = settings.pop("make_optimizer", adamw)
    model, optimizer = windlass.offload(model, make_optimizer(model), ssd_dirs=ssd_dirs, **settings)
    try:
        yield model, optimizer
    finally:
        optimizer.close()


def assert_same_weights(model: nn.Module, plain: nn.Module) -> None:
    """Checks that every entry of the two state dicts is equal bit for bit."""
    found, expected = model.state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
