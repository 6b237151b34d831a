"""A world that carries out a policy's instructions in any order, and checks each one as it is issued.

It keeps its own account of what is true, such as which params are written and where gradients lie, and never asks the
policy.
"""

import copy
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ExportModel,
    GradChunk,
    GradOffloaded,
    GradSlotsReturned,
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
from windlass.actors.policy.pipeline import Instruction, NotFiniteError, Pipeline
from windlass.actors.policy.shape import JobShape
from windlass.actors.policy.trainer import Trainer
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
    """A small job; `tied`: the head reads the embedding's params as well as its own.

    Unless told otherwise, gradients are kept where that must be: with clipping.
    """
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
        "keeps_grads": options.get("clip_norm") is not None,
        "updates_alone": False,
        "max_bad_steps": 10,
    }
    return JobShape(
        job=JOB,
        attempt=Attempt(3),
        chunks=tuple(
            tuple(ChunkKey(BlockIndex(b), ChunkIndex(c)) for c in range(num)) for b, num in enumerate(chunks_per_block)
        ),
        shared=tuple(shared),
        learning_rate=lambda step: 0.5 / step,
        trainer_state=lambda step: "",  # the world's own takes its place
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
    """The squared norm of a block's gradient before the loss is scaled: some steps need clipping, some do not."""
    return float((block + 1) * (100 if step % 2 else 0.01))


def not_finite(step: int, block: int) -> float:
    """What the world's GPU worker reports of a bad gradient."""
    return math.inf if (step + block) % 2 else math.nan


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
    """Holds a policy's outstanding instructions. `choices` may happen next; `deliver` makes one of them happen.

    `bad`: steps and blocks whose gradient is not finite.
    """

    def __init__(
        self,
        shape: JobShape,
        initial_step: int | None = None,
        *,
        bad: frozenset[tuple[int, int]] = frozenset(),
        scales_loss: bool = False,
    ) -> None:
        self.shape = shape
        self.bad = frozenset(key for key in bad if key[1] < shape.num_blocks)
        self.skipped = frozenset(step for step, _ in self.bad) if shape.keeps_grads else frozenset()
        self.scales_loss = scales_loss
        trainer = Trainer(scales_loss=scales_loss)
        trainer.restore(self.expected_trainer(initial_step or 0))
        self.pipeline = Pipeline(self._with_state(), trainer, None if initial_step is None else Step(initial_step))
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
        self.lent: set[tuple[int, int]] = set()  # whose grad slots are neither an optimizer's nor the GPU worker's
        self.to_offload: set[tuple[int, int]] = set()
        self.to_update: set[tuple[int, int]] = set()
        self.asked_commits: list[int] = []
        self.committed = -1 if initial_step is None else initial_step
        self.exports: list[tuple[int, str]] = []
        self.delivered: list[Message] = []
        self.stopped_at: int | None = None  # the last step of which anything was granted when the job was stopped
        self.begun = max(self.committed, 0)
        self.failed = False  # gradients were bad and could not be skipped

    def fork(self) -> "World":
        """An independent copy; needs a policy whose program can be copied."""
        shared = (self.shape, self.pipeline.shape, self.expected, self.bad, self.skipped)
        twin = copy.deepcopy(self, {id(each): each for each in shared})
        twin.pipeline.shape = twin._with_state()
        return twin

    def _with_state(self) -> JobShape:
        """The shape, with commits that keep what the trainer is at that moment."""
        return replace(
            self.shape, trainer_state=lambda step: json.dumps({"step": step, **self.pipeline.trainer.to_json()})
        )

    # --- what bad gradients lead to ---------------------------------------------------------------------------------

    def num_skipped_in_a_row(self, step: int) -> int:
        """Skipped steps up to this one, since the last good one."""
        last_good = next(each for each in range(step, -1, -1) if each not in self.skipped)
        return step - last_good

    def expected_trainer(self, step: int) -> dict[str, float]:
        """The trainer's state after a step; far too early for the loss scale to grow."""
        num_bad = sum(each <= step for each in self.skipped)
        last_bad = max((each for each in self.skipped if each <= step), default=0)
        return {
            "optimizer_step": step - num_bad,
            "bad_steps": self.num_skipped_in_a_row(step),
            "loss_scale": 65536.0 / 2**num_bad,
            "good_steps": step - last_bad,
        }

    def expected_loss_scale(self, step: int) -> float:
        """What the gradients of a step are multiplied by."""
        return self.expected_trainer(step - 1)["loss_scale"] if self.scales_loss else 1.0

    def _expected_failure(self, event: Message) -> str | None:
        """What the policy must say where it cannot go on after an event that has just happened."""
        if not isinstance(event, BlockBackwardDone):
            return None
        if not self.shape.keeps_grads:
            is_bad = (event.step, event.block) in self.bad
            return f"a gradient of step {event.step} is not finite.* ends at step {event.step - 1}" if is_bad else None
        num = self.num_skipped_in_a_row(event.step)
        if not self._gradients_complete(event.step) or num <= self.shape.max_bad_steps:
            return None
        return f"gradients of {num} steps in a row, up to step {event.step}, were not finite"

    # --- what may happen next ---------------------------------------------------------------------------------------

    def choices(self) -> list[Pending]:
        """Every event that could come next. Operations run in the order they came; all else in any order."""
        found: list[Pending] = []
        if self.failed:
            return found
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
            key = (int(compute.step), int(compute.block))
            size = grad_sq_sum(*key) * self.expected_loss_scale(compute.step) ** 2
            if key in self.bad:
                size = not_finite(*key)
            done = BlockBackwardDone(job=JOB, step=compute.step, block=compute.block, grad_sq_sum=size)
            return Pending(done, f"gradient {compute.step} {compute.block}")
        computed = BlockComputed(
            job=JOB,
            step=compute.step,
            op=compute.op,
            phase=compute.phase,
            block=compute.block,
            compute_s=0.1,
            is_finite=True,
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
        if (text := self._expected_failure(event)) is not None:
            with pytest.raises(NotFiniteError, match=text):
                self.pipeline.handle(event, now_s)
            self.failed = True
            return []
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
                if self.shape.keeps_grads and self._gradients_complete(event.step):
                    self._note_to_update(event.step)
            case BlockComputed():
                compute = self.computing.pop(0)
                self.backward_told = False
                self.computed.append((compute.step, compute.phase, compute.block, compute.group))
            case GradOffloaded():
                key = (int(event.step), int(event.block))
                del self.offloading[key]
                self.offloaded[key] = event.chunks
                self.lent.add(key)
                if not self.shape.keeps_grads or self._gradients_complete(event.step):
                    self._note_to_update(event.step)
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
                    if event.step in self.skipped:
                        self.written = [event.step] * self.shape.num_blocks
            case ModelExported():
                self.exporting = None
                self.exports.append((event.step, event.path))

    def _note_to_update(self, step: int) -> None:
        """What lies on the host and may be updated; nothing of a step that is skipped."""
        if step not in self.skipped:
            self.to_update |= {key for key in self.lent if key[0] == step}

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
        self._check_skipped()
        self._check_ends()
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
            case GradSlotsReturned():
                self._take_back(to, message)
            case CommitStore():
                self._take_commit(to, message)
            case ExportModel():
                self._take_export(to, message)
            case _:
                raise AssertionError(f"nobody expects {message}")

    def _take_back(self, to: ActorName, message: GradSlotsReturned) -> None:
        assert to == GPU
        assert message.step in self.skipped, "an optimizer returns the slots of a step that is not skipped"
        assert self._gradients_complete(message.step)
        spans = {tuple(chunk.span for chunk in self.offloaded[key]): key for key in self.lent if key[0] == message.step}
        self.lent.remove(spans[message.spans])  # whole blocks, each once

    def _take_commit(self, to: ActorName, message: CommitStore) -> None:
        step = message.step
        assert to not in self.committing
        assert message.is_unchanged == (step in self.skipped)
        if message.is_unchanged:
            assert self.committed == step - 1, "a step is carried over before the one before is safe"
            assert set(self.written) == {step - 1}
            assert sum(s == step for s, _ in self.offloaded) == self.shape.num_blocks
        else:
            assert set(self.written) == {step}, "a step is committed before all of it is written"
        assert not {key for key in self.lent if key[0] == step}
        assert message.attempt == self.shape.attempt
        assert json.loads(message.trainer_state) == {"step": step, **self.expected_trainer(step)}
        self.committing[to] = message
        self.asked_commits.append(step)

    def _check_skipped(self) -> None:
        """No slot of a skipped step stays where it is; nothing of it is updated."""
        skipped = {step for step in self.skipped if self._gradients_complete(step)}
        assert not skipped & {step for step, _ in self.lent}, "slots of a skipped step are kept"
        assert not skipped & {step for step, _ in self.updating}

    def _check_ends(self) -> None:
        """What a step turned out to be is told once all its gradients are known."""
        begun = {step for step, _ in self.backward_done}
        assert self.pipeline.ends.keys() == {step for step in begun if self._gradients_complete(step)}
        for step, end in self.pipeline.ends.items():
            norm = math.nan if step in self.skipped else self.grad_norm(step)
            assert end.grad_norm == pytest.approx(norm, rel=1e-12, abs=0.0, nan_ok=True)
            assert end.loss_scale == self.expected_loss_scale(step)
            assert end.num_skipped == sum(each <= step for each in self.skipped)

    def _take_compute(self, to: ActorName, message: ComputeBlock) -> None:
        assert to == GPU
        assert self.committed >= 0
        assert self.stopped_at is None or message.step <= self.stopped_at, "a step began after the job was stopped"
        found = (message.step, message.phase, message.block, message.group)
        assert found == self.expected[self.num_issued]
        self.num_issued += 1
        self.begun = max(self.begun, message.step)
        assert message.loss_scale == (self.expected_loss_scale(message.step) if message.phase is Phase.HEAD else 1.0)
        assert message.blocks == self.shape.shared[message.block]
        evaluates = message.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD)
        version = message.step if evaluates else message.step - 1
        if self.shape.updates_alone:
            assert set(self.written) == {version}, "a block is computed beside updates"
        for block in message.blocks:
            assert self.written[block] == version, "a block is computed with params of another step"
            assert (message.op, block, version) in self.prefetched
        assert all(message.op > other.op for other in self.computing)
        self.computing.append(message)

    def _take_update(self, to: ActorName, message: UpdateBlock) -> None:
        key = (int(message.step), int(message.block))
        assert self.committed >= message.step - 1, "what a restart needs would be overwritten"
        assert message.learning_rate == self.shape.learning_rate(message.step)
        assert message.grad_scale == pytest.approx(self.expected_grad_scale(message.step), rel=1e-12, abs=0.0)
        assert message.optimizer_step == self.expected_trainer(message.step)["optimizer_step"]
        if self.shape.keeps_grads:
            assert self._gradients_complete(message.step)
            assert message.step not in self.skipped
        if self.shape.updates_alone:
            assert len(self.computing) == self.backward_told, "a block is updated beside the backward pass"
        if key not in self.updating:
            assert key == min(self.to_update), "a later block overtook an earlier one"
            self.to_update.remove(key)
            self.lent.remove(key)
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
        """Takes the loss scale back out, and clips. Source: torch.nn.utils.clip_grad_norm_."""
        unscaled = 1.0 / self.expected_loss_scale(step)
        if self.shape.clip_norm is None:
            return unscaled
        return unscaled * min(1.0, self.shape.clip_norm / (self.grad_norm(step) + 1e-6))

    def grad_norm(self, step: int) -> float:
        """Of a step whose gradients are finite."""
        return math.sqrt(sum(grad_sq_sum(step, block) for block in range(self.shape.num_blocks)))

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
        """Everything was done, once, in program order, and is committed; unless bad gradients ended it before."""
        if self.failed:
            return
        assert self.pipeline.finished
        assert not self.choices()
        assert not self.to_offload
        assert not self.to_update
        assert not self.lent
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
