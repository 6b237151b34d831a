"""Small jobs for the policy: their shapes, their gradients, and their operations in the order of the design."""

import math
from dataclasses import fields
from typing import Any

from windlass.actors.messages import BlockComputed, ComputeBlock, ComputeProgressed, GradReady, Phase
from windlass.actors.policy.config import SchedulerConfig, StageActors
from windlass.actors.worker_policy.block_queue import Ordering
from windlass.actors.worker_policy.stages import Stage
from windlass.storage.ids import ActorName, Attempt, BlockIndex, ChunkIndex, ChunkKey, JobId, Step

JOB = JobId("ftjob-1")
GPU = ActorName("gpu-0")
WITH_GRADIENT = (Phase.HEAD, Phase.BACKWARD)
TRAINING = (Phase.FORWARD, *WITH_GRADIENT)
EVALUATION = (Phase.EVALUATE, Phase.EVALUATE_HEAD)


def make_shape(
    *,
    chunks_per_block: tuple[int, ...] = (2, 1, 3, 1),
    tied: bool = False,
    num_optimizers: int = 1,
    num_ssds: int = 1,
    num_ranks: int | tuple[int, ...] = 1,
    cuts: tuple[int, ...] = (),
    **options: Any,
) -> SchedulerConfig:
    """A small job; `tied`: the head reads the embedding's params as well as its own.

    `cuts`: the first blocks of the boxes after the first one; those of blocks that the job lacks are left out.
    `num_ranks`: of each box, or of the boxes in turn.

    Gradients are kept if clipping needs it, unless `keeps_grads` says otherwise. Options may also be fields of the
    ordering.
    """
    ordering = {field.name: options.pop(field.name) for field in fields(Ordering) if field.name in options}
    last = len(chunks_per_block) - 1
    shared = [(BlockIndex(b),) for b in range(last)] + [
        (BlockIndex(last), BlockIndex(0)) if tied else (BlockIndex(last),)
    ]
    ranks = (num_ranks,) if isinstance(num_ranks, int) else num_ranks
    settings: dict[str, Any] = {
        "total_steps": 2,
        "num_evaluation_groups": 0,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "clip_norm": None,
        "keeps_grads": options.get("clip_norm") is not None,
        "ordering": Ordering(**ordering),
        "max_bad_steps": 10,
    }
    return SchedulerConfig(
        job=JOB,
        attempt=Attempt(3),
        chunks=tuple(
            tuple(ChunkKey(BlockIndex(b), ChunkIndex(c)) for c in range(num)) for b, num in enumerate(chunks_per_block)
        ),
        shared=tuple(shared),
        learning_rate=lambda step: 0.5 / step,
        stages=tuple(
            StageActors(
                blocks=Stage(first, stop),
                gpu_workers=tuple(ActorName(f"{name}gpu-{rank}") for rank in range(ranks[box % len(ranks)])),
                optimizers=tuple(ActorName(f"{name}optimizer-{i}") for i in range(num_optimizers)),
            )
            for box, (first, stop, name) in enumerate(_stages(cuts, len(chunks_per_block)))
        ),
        ssd_servers=tuple(ActorName(f"ssd-{i}") for i in range(num_ssds)),
        output_dir="/models/out",
        **(settings | options),
    )


def _stages(cuts: tuple[int, ...], num_blocks: int) -> list[tuple[int, int, str]]:
    """The first block and the end of each stage, and what the names of its actors begin with."""
    firsts = [0, *sorted({cut for cut in cuts if 0 < cut < num_blocks})]
    stops = [*firsts[1:], num_blocks]
    return [(first, stop, f"b{i}/" if i else "") for i, (first, stop) in enumerate(zip(firsts, stops, strict=True))]


def computed(operation: ComputeBlock, actor: ActorName = GPU) -> ComputeProgressed:
    """The report that an operation is done."""
    done = BlockComputed(
        job=JOB,
        step=operation.step,
        op=operation.op,
        phase=operation.phase,
        block=operation.block,
        group=operation.group,
        compute_s=0.1,
        is_finite=True,
    )
    return ComputeProgressed(job=JOB, step=operation.step, actor=actor, computed=(done,), grads=())


def grad_ready(step: int, block: int, *sq_sums: float, actor: ActorName = GPU) -> ComputeProgressed:
    """The report that a block's gradient is where it stays until the update."""
    grad = GradReady(job=JOB, step=Step(step), block=BlockIndex(block), sq_sums=sq_sums)
    return ComputeProgressed(job=JOB, step=Step(step), actor=actor, computed=(), grads=(grad,))


def stage_of(shape: SchedulerConfig, block: int) -> StageActors:
    """The stage of a block."""
    (stage,) = [stage for stage in shape.stages if stage.blocks.first <= block < stage.blocks.stop]
    return stage


def holders(shape: SchedulerConfig, block: int) -> dict[ActorName, tuple[ChunkKey, ...]]:
    """The actors that update a block, and the chunks of each. The GPU worker updates blocks as a whole: no chunks."""
    stage = stage_of(shape, block)
    if block in shape.device_blocks:
        return {stage.gpu_workers[0]: ()}
    num = len(stage.optimizers)
    shares = {actor: shape.chunks[block][place::num] for place, actor in enumerate(stage.optimizers)}
    return {actor: share for actor, share in shares.items() if share}


def grad_sq_sum(step: int, block: int) -> float:
    """The squared norm of a block's gradient before loss scaling: some steps need clipping, some do not."""
    return float((block + 1) * (100 if step % 2 else 0.01))


def not_finite(step: int, block: int) -> float:
    """The norm that the world's GPU worker reports for a bad gradient."""
    return math.inf if (step + block) % 2 else math.nan


Described = tuple[int, Phase | None, int, int]


def _expected_training(shape: SchedulerConfig, step: int, index: int) -> list[Described]:
    """The operations of a step on one box, in the order of the design.

    Some rounds of groups pass forward. Then the next one passes forward, and the first one that is left backward.
    """
    blocks, num_ranks = shape.stages[index].blocks, len(shape.stages[index].gpu_workers)
    own, head = range(blocks.first, blocks.stop), shape.num_blocks - 1
    rounds = [range(first, shape.num_groups)[:num_ranks] for first in range(0, shape.num_groups, num_ranks)]
    # Before its first backward pass a box has as many groups as the GPUs of the next one compute, and a round more.
    num_before = 0
    for stage in reversed(shape.stages[index:]):
        num_ahead = -(-num_before // len(stage.gpu_workers))
        num_before = (num_ahead + 1) * len(stage.gpu_workers)
    num_ahead = min(num_ahead, len(rounds) - 1)
    found: list[Described] = []
    for forward, backward in zip([*rounds, *[range(0)] * num_ahead], [*[range(0)] * num_ahead, *rounds], strict=True):
        for group in forward:
            found += [(step, Phase.HEAD if b == head else Phase.FORWARD, b, group) for b in own]
        for group in backward:
            found += [(step, Phase.BACKWARD, b, group) for b in reversed(own) if b != head]
    return found


def expected_operations(shape: SchedulerConfig, first_step: int) -> list[Described]:
    """(step, phase, block, group) of every operation, in each box's order of the design; phase None is an export."""
    head = shape.num_blocks - 1
    found: list[Described] = []
    for step in range(first_step - 1, shape.total_steps + 1):
        if step >= first_step:
            for index in range(len(shape.stages)):
                found += _expected_training(shape, step, index)
        elif step == 0:
            continue  # a resumed job repeats what follows its step
        last = step == shape.total_steps
        if shape.num_evaluation_groups and (last or (shape.evaluate_every and step % shape.evaluate_every == 0)):
            for group in range(shape.num_evaluation_groups):
                found += [(step, Phase.EVALUATE, b, group) for b in range(head)]
                found += [(step, Phase.EVALUATE_HEAD, head, group)]
        if last or (shape.checkpoint_every and step % shape.checkpoint_every == 0):
            found += [(step, None, 0, 0)]
    return found


class Expected:
    """The results that follow only from a job's shape and its gradients.

    `bad`: (step, block) whose gradient is not finite.
    """

    def __init__(self, shape: SchedulerConfig, bad: frozenset[tuple[int, int]], scales_loss: bool) -> None:
        self.shape = shape
        self.bad = frozenset(key for key in bad if key[1] < shape.num_blocks)
        self.skipped = frozenset(step for step, _ in self.bad) if shape.keeps_grads else frozenset()
        self.scales_loss = scales_loss

    def worker_of(self, group: int, block: int = 0) -> ActorName:
        """The GPU worker that computes a block for a group: those of the block's box are dealt in turn."""
        workers = stage_of(self.shape, block).gpu_workers
        return workers[group % len(workers)]

    def grads_worker(self, block: int = 0) -> ActorName:
        """The GPU worker that completes the gradient of a block: that of the last group."""
        return self.worker_of(self.shape.num_groups - 1, block)

    def last_good(self, step: int) -> int:
        """The last step, up to this one, that is not skipped."""
        return next((each for each in range(step, -1, -1) if each not in self.skipped), -1)

    def num_skipped_in_a_row(self, step: int) -> int:
        """The number of skipped steps up to this one, since the last good one."""
        return step - self.last_good(step)

    def expected_trainer(self, step: int) -> dict[str, float]:
        """The trainer's state after a step; the loss scale is too young to grow."""
        num_bad = sum(each <= step for each in self.skipped)
        last_bad = max((each for each in self.skipped if each <= step), default=0)
        return {
            "optimizer_step": step - num_bad,
            "bad_steps": self.num_skipped_in_a_row(step),
            "loss_scale": 65536.0 / 2**num_bad,
            "good_steps": step - last_bad,
        }

    def expected_loss_scale(self, step: int) -> float:
        """The factor of the gradients of a step."""
        return self.expected_trainer(step - 1)["loss_scale"] if self.scales_loss else 1.0

    def expected_grad_scale(self, step: int) -> float:
        """The factor that removes the loss scale and clips. Source: torch.nn.utils.clip_grad_norm_."""
        unscaled = 1.0 / self.expected_loss_scale(step)
        if self.shape.clip_norm is None:
            return unscaled
        return unscaled * min(1.0, self.shape.clip_norm / (self.grad_norm(step) + 1e-6))

    def grad_norm(self, step: int) -> float:
        """The gradient norm of a step whose gradients are finite."""
        return math.sqrt(sum(grad_sq_sum(step, block) for block in range(self.shape.num_blocks)))
