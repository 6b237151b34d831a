"""A world that carries out a policy's instructions in any order, and checks each one as it is issued.

It keeps its own account of what is true, such as which params are written and where gradients lie, and never asks the
policy.
"""

import copy
import json
from dataclasses import dataclass
from typing import Any

from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ExportModel,
    GradChunk,
    GradOffloaded,
    LoadModel,
    Message,
    ModelExported,
    ModelLoaded,
    OffloadGrad,
    Phase,
    PrefetchParams,
    StoreCommitted,
    UpdateBlock,
)
from windlass.actors.policy.pipeline import Instruction, Pipeline
from windlass.actors.policy.shape import JobShape
from windlass.storage.ids import ActorName, Attempt, BlockIndex, ChunkIndex, ChunkKey, JobId, Span, Step

JOB = JobId("ftjob-1")
GPU = ActorName("gpu-0")
WITH_GRADIENT = (Phase.HEAD, Phase.BACKWARD)


def make_shape(
    *,
    chunks_per_block: tuple[int, ...] = (2, 1, 3, 1),
    tied: bool = False,
    num_optimizers: int = 1,
    num_ssds: int = 1,
    **options: Any,
) -> JobShape:
    """A small job; `tied`: the head reads the embedding's params as well as its own."""
    last = len(chunks_per_block) - 1
    shared = [(BlockIndex(b),) for b in range(last)] + [
        (BlockIndex(last), BlockIndex(0)) if tied else (BlockIndex(last),)
    ]
    settings: dict[str, Any] = {
        "total_steps": 2,
        "num_evaluation_groups": 0,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "clip_norm": None,
    }
    return JobShape(
        job=JOB,
        attempt=Attempt(3),
        chunks=tuple(
            tuple(ChunkKey(BlockIndex(b), ChunkIndex(c)) for c in range(num)) for b, num in enumerate(chunks_per_block)
        ),
        shared=tuple(shared),
        learning_rate=lambda step: 0.5 / step,
        trainer_state=lambda step: f'{{"optimizer_step": {step}}}',
        gpu_worker=GPU,
        optimizers=tuple(ActorName(f"optimizer-{i}") for i in range(num_optimizers)),
        ssd_servers=tuple(ActorName(f"ssd-{i}") for i in range(num_ssds)),
        output_dir="/models/out",
        **(settings | options),
    )


def grad_chunks(shape: JobShape, block: int) -> tuple[GradChunk, ...]:
    """Where the gradient of a block lies once it is offloaded."""
    return tuple(GradChunk(key, Span(4096 * (10 * key.block + key.chunk), 4096)) for key in shape.chunks[block])


def grad_sq_sum(step: int, block: int) -> float:
    """The squared gradient norm that the world's GPU worker reports: some steps need clipping, some do not."""
    return float((block + 1) * (100 if step % 2 else 0.01))


def expected_operations(shape: JobShape, first_step: int) -> list[tuple[int, Phase | None, int, int]]:
    """(step, phase, block, group) of every operation, written down as the design tells it; phase None is an export."""
    layers = list(range(shape.num_blocks - 1))
    head = shape.num_blocks - 1
    found: list[tuple[int, Phase | None, int, int]] = []
    for step in range(first_step - 1, shape.total_steps + 1):
        if step >= first_step:
            found += [(step, Phase.FORWARD, b, 0) for b in layers]
            found += [(step, Phase.HEAD, head, 0)]
            found += [(step, Phase.BACKWARD, b, 0) for b in reversed(layers)]
        elif step == 0:
            continue  # what follows a step is due again for the one that a resumed job goes on from
        last = step == shape.total_steps
        if shape.num_evaluation_groups and (last or (shape.evaluate_every and step % shape.evaluate_every == 0)):
            for group in range(shape.num_evaluation_groups):
                found += [(step, Phase.EVALUATE, b, group) for b in layers]
                found += [(step, Phase.EVALUATE_HEAD, head, group)]
        if last or (shape.checkpoint_every and step % shape.checkpoint_every == 0):
            found += [(step, None, 0, 0)]
    return found


@dataclass(frozen=True, slots=True)
class Pending:
    """An event that could happen now: what the actor would report."""

    event: Message
    answers: str  # key of the instruction that it answers; some instructions are answered by two events


class World:
    """Holds a policy's outstanding instructions. `choices` may happen next; `deliver` makes one of them happen."""

    def __init__(self, shape: JobShape, initial_step: int | None = None) -> None:
        self.shape = shape
        self.pipeline = Pipeline(shape, None if initial_step is None else Step(initial_step))
        first_step = (initial_step or 0) + 1
        self.expected = expected_operations(shape, first_step)
        self.computing: list[ComputeBlock] = []  # in the order they came: so they are computed
        self.backward_told = False  # of the first one in `computing`
        self.offloading: dict[tuple[int, int], OffloadGrad] = {}
        self.updating: dict[tuple[int, int], dict[ActorName, UpdateBlock]] = {}
        self.committing: dict[ActorName, CommitStore] = {}
        self.loading = False
        self.exporting: ExportModel | None = None
        self.num_issued = 0  # operations
        self.computed: list[tuple[int, Phase, int, int]] = []
        self.prefetched: set[tuple[int, int, int]] = set()  # (op, block, version)
        self.written = [-1 if initial_step is None else initial_step] * shape.num_blocks
        self.backward_done: set[tuple[int, int]] = set()
        self.offloaded: dict[tuple[int, int], tuple[GradChunk, ...]] = {}
        self.to_offload: set[tuple[int, int]] = set()
        self.to_update: set[tuple[int, int]] = set()
        self.asked_commits: list[int] = []
        self.committed = -1 if initial_step is None else initial_step
        self.exports: list[tuple[int, str]] = []
        self.delivered: list[Message] = []
        self.stopped_at: int | None = None  # the last step of which anything was granted when the job was stopped
        self.begun = max(self.committed, 0)

    def fork(self) -> "World":
        """An independent copy; needs a policy whose program can be copied."""
        return copy.deepcopy(self, {id(self.shape): self.shape, id(self.expected): self.expected})

    # --- what may happen next ---------------------------------------------------------------------------------------

    def choices(self) -> list[Pending]:
        """Every event that could come next. Operations run in the order they came; all else in any order."""
        found = []
        if self.loading:
            found.append(Pending(ModelLoaded(job=JOB, step=Step(0)), "load"))
        if self.computing:
            found.append(self._next_of_compute(self.computing[0]))
        for (step, block), _ in self.offloading.items():
            event = GradOffloaded(
                job=JOB, step=Step(step), block=BlockIndex(block), chunks=grad_chunks(self.shape, block)
            )
            found.append(Pending(event, f"offload {step} {block}"))
        for (step, block), shares in self.updating.items():
            for actor in shares:
                updated = BlockUpdated(job=JOB, step=Step(step), block=BlockIndex(block), actor=actor)
                found.append(Pending(updated, f"update {step} {block} {actor}"))
        for actor, commit in self.committing.items():
            committed = StoreCommitted(job=JOB, step=commit.step, actor=actor, bytes_read=1, bytes_written=1)
            found.append(Pending(committed, f"commit {commit.step} {actor}"))
        if self.exporting is not None:
            exported = ModelExported(job=JOB, step=self.exporting.step, path=self.exporting.path)
            found.append(Pending(exported, f"export {self.exporting.step}"))
        return found

    def _next_of_compute(self, compute: ComputeBlock) -> Pending:
        if compute.phase in WITH_GRADIENT and not self.backward_told:
            size = 0.0 if self.shape.clip_norm is None else grad_sq_sum(compute.step, compute.block)
            done = BlockBackwardDone(job=JOB, step=compute.step, block=compute.block, grad_sq_sum=size)
            return Pending(done, f"gradient {compute.step} {compute.block}")
        computed = BlockComputed(
            job=JOB, step=compute.step, op=compute.op, phase=compute.phase, block=compute.block, compute_s=0.1
        )
        return Pending(computed, f"compute {compute.op}")

    # --- making it happen -------------------------------------------------------------------------------------------

    def start(self, now_s: float = 0.0) -> None:
        self._take(self.pipeline.start(now_s))

    def deliver(self, pending: Pending, now_s: float = 0.0) -> list[Instruction]:
        """Lets an event happen, and checks what the policy makes of it."""
        event = pending.event
        self._account(event)
        self.delivered.append(event)
        instructions = self.pipeline.handle(event, now_s)
        self._take(instructions)
        return instructions

    def stop(self) -> None:
        if self.stopped_at is None:
            self.stopped_at = self.begun
        self.pipeline.stop_after_current_step()

    def _account(self, event: Message) -> None:
        """What is true once the event has happened."""
        match event:
            case ModelLoaded():
                self.loading = False
                self.written = [0] * self.shape.num_blocks
            case BlockBackwardDone():
                self.backward_told = True
                self.backward_done.add((event.step, event.block))
                self.to_offload.add((event.step, event.block))
                if self.shape.clip_norm is not None and self._gradients_complete(event.step):
                    self.to_update |= {key for key in self.offloaded if key[0] == event.step}
            case BlockComputed():
                compute = self.computing.pop(0)
                self.backward_told = False
                self.computed.append((compute.step, compute.phase, compute.block, compute.group))
            case GradOffloaded():
                key = (int(event.step), int(event.block))
                del self.offloading[key]
                self.offloaded[key] = event.chunks
                if self.shape.clip_norm is None or self._gradients_complete(event.step):
                    self.to_update.add(key)
            case BlockUpdated():
                shares = self.updating[(event.step, event.block)]
                del shares[event.actor]
                if not shares:
                    del self.updating[(event.step, event.block)]
                    self.written[event.block] = event.step
            case StoreCommitted():
                del self.committing[event.actor]
                if not self.committing:
                    self.committed = event.step
            case ModelExported():
                self.exporting = None
                self.exports.append((event.step, event.path))

    def _gradients_complete(self, step: int) -> bool:
        return sum(s == step for s, _ in self.backward_done) == self.shape.num_blocks

    # --- checking what the policy issues ----------------------------------------------------------------------------

    def _take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert instruction.message.job == JOB
            self._take_one(instruction.to, instruction.message)
        self._check_commit_is_whole()
        assert len(self.computing) <= self.shape.max_prefetched
        assert len(self.offloading) <= self.shape.max_offloading
        assert len(self.updating) <= self.shape.max_updating
        # Every wait has a deadline: what is outstanding here and what the policy waits for are the same.
        num_outstanding = sum(len(shares) for shares in self.updating.values()) + len(self.committing)
        num_outstanding += len(self.offloading) + self.loading + (self.exporting is not None)
        num_gradients = sum(c.phase in WITH_GRADIENT for c in self.computing) - self.backward_told
        assert len(self.pipeline.waits) == num_outstanding + len(self.computing) + num_gradients
        assert self.pipeline.committed == self.committed
        if self.pipeline.finished:
            assert not self.choices()
        else:
            assert self.choices(), "nothing is outstanding and the job is not finished: it is stuck"

    def _take_one(self, to: ActorName, message: Message) -> None:
        match message:
            case LoadModel():
                assert to == self.shape.optimizers[0]
                assert not self.delivered
                self.loading = True
            case PrefetchParams():
                assert to == GPU
                assert self.written[message.block] == message.step, "params are fetched before they are written"
                self.prefetched.add((message.op, message.block, message.step))
            case ComputeBlock():
                self._take_compute(to, message)
            case OffloadGrad():
                key = (int(message.step), int(message.block))
                assert to == GPU
                assert key == min(self.to_offload), "a later block overtook an earlier one"
                self.to_offload.remove(key)
                self.offloading[key] = message
            case UpdateBlock():
                self._take_update(to, message)
            case CommitStore():
                assert to not in self.committing
                assert set(self.written) == {message.step}, "a step is committed before all of it is written"
                assert message.attempt == self.shape.attempt
                assert json.loads(message.trainer_state) == {"optimizer_step": message.step}
                self.committing[to] = message
                self.asked_commits.append(message.step)
            case ExportModel():
                self._take_export(to, message)
            case _:
                raise AssertionError(f"nobody expects {message}")

    def _take_compute(self, to: ActorName, message: ComputeBlock) -> None:
        assert to == GPU
        assert self.committed >= 0
        assert self.stopped_at is None or message.step <= self.stopped_at, "a step began after the job was stopped"
        found = (message.step, message.phase, message.block, message.group)
        assert found == self.expected[self.num_issued]
        self.num_issued += 1
        self.begun = max(self.begun, message.step)
        assert message.blocks == self.shape.shared[message.block]
        evaluates = message.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD)
        version = message.step if evaluates else message.step - 1
        for block in message.blocks:
            assert self.written[block] == version, "a block is computed with params of another step"
            assert (message.op, block, version) in self.prefetched
        assert all(message.op > other.op for other in self.computing)
        self.computing.append(message)

    def _take_update(self, to: ActorName, message: UpdateBlock) -> None:
        key = (int(message.step), int(message.block))
        assert self.committed >= message.step - 1, "what a restart needs would be overwritten"
        assert message.learning_rate == self.shape.learning_rate(message.step)
        assert message.grad_scale == self.expected_grad_scale(message.step)
        if self.shape.clip_norm is not None:
            assert self._gradients_complete(message.step)
        if key not in self.updating:
            assert key == min(self.to_update), "a later block overtook an earlier one"
            self.to_update.remove(key)
            self.updating[key] = {}
        shares = self.updating[key]
        assert to in self.shape.optimizers
        assert to not in shares
        shares[to] = message
        place = self.shape.optimizers.index(to)
        num = len(self.shape.optimizers)
        assert message.chunks == tuple(c for c in self.offloaded[key] if c.key.chunk % num == place)
        assert message.chunks

    def expected_grad_scale(self, step: int) -> float:
        """Source: torch.nn.utils.clip_grad_norm_."""
        if self.shape.clip_norm is None:
            return 1.0
        norm = sum(grad_sq_sum(step, block) for block in range(self.shape.num_blocks)) ** 0.5
        return min(1.0, self.shape.clip_norm / (norm + 1e-6))

    def _take_export(self, to: ActorName, message: ExportModel) -> None:
        assert to == self.shape.optimizers[0]
        assert self.stopped_at is None
        assert (message.step, None, 0, 0) == self.expected[self.num_issued]
        self.num_issued += 1
        assert self.committed == message.step
        assert not self.computing
        assert set(self.written) == {message.step}
        self.exporting = message

    def _check_commit_is_whole(self) -> None:
        """Commands of one answer go out together: every share of an update, every server of a commit."""
        for (step, block), shares in self.updating.items():
            if not any(isinstance(e, BlockUpdated) and (e.step, e.block) == (step, block) for e in self.delivered):
                keys = sorted(chunk.key for share in shares.values() for chunk in share.chunks)
                assert keys == list(self.shape.chunks[block])
        if self.committing and self.asked_commits:
            step = self.asked_commits[-1]
            assert self.asked_commits.count(step) == len(self.shape.ssd_servers)

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Everything was done, once, in program order, and is committed."""
        assert self.pipeline.finished
        assert not self.choices()
        assert not self.to_offload
        assert not self.to_update
        last = self.shape.total_steps if self.stopped_at is None else self.stopped_at
        assert self.committed == last
        assert set(self.written) == {last}
        expected = self.expected[: self.num_issued]
        if self.stopped_at is None:
            assert self.num_issued == len(self.expected)
        else:
            trained = [o for o in self.expected if o[0] <= last and o[1] in (Phase.FORWARD, *WITH_GRADIENT)]
            assert [o for o in expected if o[1] in (Phase.FORWARD, *WITH_GRADIENT)] == trained
        assert self.computed == [o for o in expected if o[1] is not None]
        exports = [o[0] for o in expected if o[1] is None]
        assert self.exports == [(step, self.shape.path_of_export(step)) for step in exports]
