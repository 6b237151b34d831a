"""The loop that the engine must equal: a job in plain PyTorch, with the whole model in memory."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from windlass.actors.job.spec import JobSpec
from windlass.engine.data.dataset import MicroBatch, PreparedDataset
from windlass.engine.data.examples import NO_TARGET
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.model.fused_kernels import apply_kernels
from windlass.engine.training_config.training_config import Optimizer
from windlass.storage.ids import ModelKernel, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """The results of the same job in plain PyTorch."""

    losses: list[float]
    validation_losses: dict[int, float]  # by step
    params: dict[str, torch.Tensor]  # fp32 masters
    grad_norms: list[float]
    loss_scales: list[float]  # by step; 1.0 except in fp16
    skipped: list[int]  # steps whose gradients overflowed in fp16


def train_plainly(spec: JobSpec, device: str = "cpu", *, is_reversed: bool = False) -> PlainRun:
    """Runs the job in plain PyTorch: the whole model, torch's own optimizer on fp32 masters, one target count a step.

    fp16 uses torch.amp.GradScaler. Kernels of other packages are used if the job names them, except for the loss, which
    is computed in fp32 anyway. So is the gradient of the head's projection, if the job names a kernel for that.
    `is_reversed`: the last example of a step comes first, so that the same sums are rounded in another order.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(spec.compute_threads)
    try:
        return _train_plainly(spec, torch.device(device), is_reversed=is_reversed)
    finally:
        torch.set_num_threads(num_threads)


def _train_plainly(spec: JobSpec, device: torch.device, *, is_reversed: bool) -> PlainRun:
    hyper = spec.training
    whole = AutoModelForCausalLM.from_pretrained(spec.model_dir, dtype=torch.float32).to(device)
    masters = dict(whole.named_parameters())
    model = AutoModelForCausalLM.from_pretrained(spec.model_dir, dtype=TORCH_DTYPE[hyper.precision]).to(device).train()
    apply_kernels(model, hyper.model_kernels or ())
    head_grads = _Fp32HeadGrads(model) if ModelKernel.FP32_PRODUCT in (hyper.model_kernels or ()) else None
    optimizer = _optimizer(spec, masters)
    schedule = get_cosine_schedule_with_warmup(optimizer, hyper.warmup_steps, hyper.total_steps)
    train, validation = (PreparedDataset.open(spec.dataset_dir, split) for split in ("train", "validation"))
    scaler = torch.amp.GradScaler(device.type, enabled=hyper.precision is Precision.FP16)
    losses, grad_norms, loss_scales, skipped, validation_losses = [], [], [], [], {}
    for step in range(1, hyper.total_steps + 1):
        batch = train.batch(step - 1, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        if is_reversed:
            batch = [_reversed(microbatch) for microbatch in reversed(batch)]
        loss_scales.append(scaler.get_scale())
        lanes = {"lanes": hyper.lanes, "nominal": hyper.num_microbatches}
        losses.append(_accumulate(model, masters, batch, scaler, head_grads=head_grads, **lanes))
        scaler.unscale_(optimizer)
        max_norm = float("inf") if hyper.clip_norm is None else hyper.clip_norm
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), max_norm)))
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < loss_scales[-1]:
            skipped.append(step)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step()`")  # if step 1 is skipped
            schedule.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        if step == hyper.total_steps or step % (hyper.evaluate_every or hyper.total_steps) == 0:
            validation_losses[step] = evaluate(model, list(validation.evaluation_batches(1)))
    params = {name: param.detach().cpu() for name, param in masters.items()}
    return PlainRun(
        losses=losses,
        validation_losses=validation_losses,
        params=params,
        grad_norms=grad_norms,
        loss_scales=loss_scales,
        skipped=skipped,
    )


class _Fp32HeadGrads:
    """Keeps the gradient of the head's projection from autograd, and computes it from fp32 copies of the factors."""

    def __init__(self, model: Any) -> None:
        self._head = model.get_output_embeddings()
        self.name = next(name for name, param in model.named_parameters() if param is self._head.weight)
        self._grad: torch.Tensor | None = None
        self._head.forward = self._forward

    def taken(self) -> torch.Tensor:
        """The gradient of one micro-batch."""
        assert self._grad is not None
        grad, self._grad = self._grad, None
        return grad

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, self._head.weight.detach())
        if logits.requires_grad:
            factor = hidden.detach().flatten(0, -2).float()
            logits.register_hook(functools.partial(self._note_product, factor))  # type: ignore[no-untyped-call]
        return logits

    def _note_product(self, factor: torch.Tensor, grad: torch.Tensor) -> None:
        assert self._grad is None
        self._grad = grad.flatten(0, -2).float().t() @ factor


def _reversed(microbatch: MicroBatch) -> MicroBatch:
    """The same examples, the last one first."""
    return dataclasses.replace(microbatch, input_ids=microbatch.input_ids.flip(0), targets=microbatch.targets.flip(0))


def _optimizer(spec: JobSpec, masters: dict[str, torch.nn.Parameter]) -> torch.optim.Adam:
    """An optimizer with weight decay on matrices only: all norms and biases of these models are vectors."""
    hyper = spec.training
    groups = [
        {"params": [param for param in masters.values() if param.ndim >= 2], "weight_decay": hyper.weight_decay},
        {"params": [param for param in masters.values() if param.ndim < 2], "weight_decay": 0.0},
    ]
    make = torch.optim.AdamW if hyper.optimizer is Optimizer.ADAMW else torch.optim.Adam
    return make(groups, lr=hyper.learning_rate, betas=(hyper.beta1, hyper.beta2), eps=hyper.epsilon)


def _accumulate(
    model: Any,
    masters: dict[str, torch.nn.Parameter],
    batch: Sequence[MicroBatch],
    scaler: torch.amp.GradScaler,
    *,
    lanes: int,
    nominal: int,
    head_grads: "_Fp32HeadGrads | None" = None,
) -> float:
    """The loss of a step. Scaled gradients are summed over each lane in fp32, and over the lanes in the masters.

    `nominal`: the micro-batches of a full step, which decide the lanes of a smaller one, too.
    """
    num_targets = sum(microbatch.num_targets for microbatch in batch)
    total = 0.0
    for lane in range(lanes):
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for microbatch in batch[lane * nominal // lanes : (lane + 1) * nominal // lanes]:
            loss_sum = _loss_sum(model, microbatch)
            model.zero_grad()
            torch.autograd.backward(scaler.scale(loss_sum / num_targets))
            total += float(loss_sum.detach())
            for name, param in model.named_parameters():
                if head_grads is None or param.grad is not None:
                    sums[name] += param.grad.float()
            if head_grads is not None:
                sums[head_grads.name] += head_grads.taken()
        for name, master in masters.items():
            master.grad = sums[name] if master.grad is None or lane == 0 else master.grad + sums[name]
    return total / num_targets


def evaluate(model: Any, batches: Sequence[MicroBatch]) -> float:
    """The loss per target token. Leaves the model in training mode."""
    model.eval()
    with torch.no_grad():
        total = sum(float(_loss_sum(model, batch)) for batch in batches)
    model.train()
    return total / sum(batch.num_targets for batch in batches)


def _loss_sum(model: Any, microbatch: MicroBatch) -> torch.Tensor:
    logits = model(input_ids=microbatch.input_ids.to(model.device), use_cache=False).logits.float()
    flat_targets = microbatch.targets.flatten().to(model.device)
    return F.cross_entropy(logits.flatten(0, 1), flat_targets, ignore_index=NO_TARGET, reduction="sum")
