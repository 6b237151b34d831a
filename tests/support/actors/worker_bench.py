"""A test bench of the GPU worker: one rank, with SSD servers that keep params in memory."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.support.actors.memory_ssds import MemorySsds
from tests.support.training import make_partition, make_spec
from windlass.actors.gpu_worker.worker import GpuWorker
from windlass.actors.job.context import grad_precision, make_context
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import (
    BlockComputed,
    CommitReached,
    ComputeBlock,
    ComputeBlocks,
    ComputeProgressed,
    GradOffloaded,
    GradReady,
    GradSlotsReleased,
    Loss,
    Message,
    Phase,
    StoredParams,
)
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.data.examples import NO_TARGET
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.storage.ids import BlockIndex, StateKind, Step
from windlass.storage.memory.arena import Arena

STEP = Step(1)
Part = TypeVar("Part", bound=Message)


class Bench:
    """A worker that `start` starts, its arena, and SSDs that hold the model's params of step 0."""

    def __init__(self, directory: Path, *, is_committed: bool = True, **changes: Any) -> None:
        self.is_committed = is_committed  # the worker knows of the commit of step 0 from the beginning
        self.spec: JobSpec = make_spec(directory, **{"num_microbatches": 2, "clip_norm": 1.0, **changes})
        self.precision = self.spec.training.precision
        self.loss_scale = 1.0
        partition = make_partition(self.spec)
        self.layout = partition.layout
        self.context = make_context(self.spec, self.layout, str(directory / "arena"))
        self.arena = Arena.create(self.context.arena_path, self.context.plan.arena_nbytes)
        self.ssds = MemorySsds(self.context, self.arena)
        self._partition = partition
        self.model = AutoModelForCausalLM.from_pretrained(
            self.spec.model_dir, dtype=TORCH_DTYPE[self.precision]
        ).train()
        self.store_params()
        self.num_operations = 0

    def start(self) -> None:
        """Starts the worker."""
        self.worker = GpuWorker(self.context, self._partition, self.ssds.send, poison_released=True)
        self.ssds.answer = self.worker.post

    def store_params(self) -> None:
        """Stores the model's current params as those of step 0."""
        params = dict(self.model.named_parameters())
        for block in self.layout.blocks:
            if block.params:
                flat = torch.cat([params[param.name].detach().flatten() for param in block.params])
                for key in self.layout.chunk_keys(block.index):
                    start, stop = self.layout.chunk_range(key)
                    self.ssds.put(0, key, self.context.formats.param_kind, flat[start:stop])

    def operation(self, phase: Phase, block: int, op: int, group: int = 0) -> ComputeBlock:
        return ComputeBlock(
            job=self.spec.job,
            step=STEP,
            op=op,
            phase=phase,
            block=BlockIndex(block),
            params=tuple(StoredParams(needed, Step(0)) for needed in self.layout.shared[block]),
            group=group,
            loss_scale=self.loss_scale if phase is Phase.HEAD else 1.0,
        )

    def grant(self, *operations: ComputeBlock) -> None:
        self.worker.post(ComputeBlocks(job=self.spec.job, step=STEP, operations=operations))

    def commit(self, step: int) -> None:
        self.worker.post(CommitReached(job=self.spec.job, step=Step(step)))

    def run(self, phase: Phase, block: int, group: int = 0) -> None:
        """Runs one operation to its end."""
        self.num_operations += 1
        self.grant(self.operation(phase, block, self.num_operations, group))
        self.receive_computed(self.num_operations)

    # --- what the worker has reported -------------------------------------------------------------------------------

    @property
    def computed(self) -> list[BlockComputed]:
        """The operations that were reported, in order."""
        return [computed for message in self.ssds.of(ComputeProgressed) for computed in message.computed]

    @property
    def losses(self) -> list[Loss]:
        return [computed.loss for computed in self.computed if computed.loss is not None]

    @property
    def grads(self) -> list[GradReady]:
        """The gradients that were reported, in order."""
        return [grad for message in self.ssds.of(ComputeProgressed) for grad in message.grads]

    def receive_computed(self, count: int) -> list[BlockComputed]:
        """Waits until at least `count` operations were reported, and returns all of them."""
        return self._receive(lambda message: message.computed, count)

    def receive_grads(self, count: int) -> list[GradReady]:
        """Waits until at least `count` gradients were reported, and returns all of them."""
        return self._receive(lambda message: message.grads, count)

    def _receive(self, parts: Callable[[ComputeProgressed], tuple[Part, ...]], count: int) -> list[Part]:
        messages = self.ssds.of(ComputeProgressed)
        while len(found := [part for message in messages for part in parts(message)]) < count:
            messages = self.ssds.receive(ComputeProgressed, len(messages) + 1)
        return found

    def received_grad(self, block: int, count: int) -> torch.Tensor:
        """Waits for `count` offloaded gradients, and returns the last one as it arrived. Releases its slots."""
        self.receive_grads(count)
        offloaded = [message for message in self.ssds.of(GradOffloaded) if message.block == block][-1]
        assert [chunk.key for chunk in offloaded.chunks] == self.layout.chunk_keys(BlockIndex(block))
        dtype = TORCH_DTYPE[grad_precision(self.spec)]
        parts = []
        for chunk in offloaded.chunks:
            if chunk.span is None:
                part = self.ssds.state(STEP, chunk.key, StateKind.GRAD, dtype)
            else:
                raw = bytearray(self.arena.buffer(chunk.span))
                part = torch.frombuffer(raw, dtype=dtype)[: self.context.chunk_numel(chunk.key)]
            parts.append(part.float())
        spans = tuple(chunk.span for chunk in offloaded.chunks if chunk.span is not None)
        self.worker.post(GradSlotsReleased(job=self.spec.job, step=STEP, spans=spans))
        return torch.cat(parts)

    # --- steps --------------------------------------------------------------------------------------------------------

    def forward_and_head(self, group: int = 0) -> int:
        """Runs the forward half of a step, or of one of its groups. Returns the head's block."""
        last = len(self.layout.blocks) - 1
        for block in range(last):
            self.run(Phase.FORWARD, block, group)
        self.run(Phase.HEAD, last, group)
        return last

    def train_step(self) -> dict[int, torch.Tensor]:
        """Runs one step's operations in order, and returns the gradient of each block."""
        last_group = self.context.plan.num_groups - 1
        for group in range(last_group):
            for block in reversed(range(self.forward_and_head(group))):
                self.run(Phase.BACKWARD, block, group)
        assert self.grads == []
        last = self.forward_and_head(last_group)
        found = {last: self.received_grad(last, 1)}
        for block in reversed(range(last)):
            self.run(Phase.BACKWARD, block, last_group)
            found[block] = self.received_grad(block, len(found) + 1)
        assert [grad.block for grad in self.grads] == list(found)
        return found

    def plain_step(self) -> tuple[float, int, dict[str, torch.Tensor]]:
        """The sum of losses, the number of targets and the scaled gradients of the first step, by plain autograd."""
        hyper = self.spec.training
        dataset = PreparedDataset.open(self.spec.dataset_dir, "train")
        batch = dataset.batch(0, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        num_targets = sum(microbatch.num_targets for microbatch in batch)
        total = 0.0
        sums = {name: torch.zeros(param.shape) for name, param in self.model.named_parameters()}
        for microbatch in batch:
            self.model.zero_grad()
            logits = self.model(input_ids=microbatch.input_ids, use_cache=False).logits.float().flatten(0, 1)
            targets = microbatch.targets.flatten()
            loss = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")
            torch.autograd.backward(loss / num_targets * self.loss_scale)
            total += float(loss.detach())
            for name, param in self.model.named_parameters():
                sums[name] += param.grad.float()
        return total, num_targets, sums


@contextlib.contextmanager
def running(bench: Bench) -> Iterator[Bench]:
    """Starts the bench's worker, and stops it at the end."""
    bench.start()
    if bench.is_committed and bench.context.plan.spilled_blocks:
        bench.commit(0)
    yield bench
    bench.worker.stop()
    bench.arena.close()


def of_bench(**options: Any) -> Any:
    return pytest.param(options, id="-".join(str(value) for value in options.values()))
