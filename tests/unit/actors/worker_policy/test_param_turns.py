"""Slots of params are shared by GPU workers of any speed: each chunk is read once, and no worker waits for ever."""

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from windlass.actors.messages import ParamChunk, ParamsCopied, ParamUse, Phase, RequestParams
from windlass.actors.worker_policy import ParamActions, ParamTurns, passes_of_step
from windlass.storage.ids import ActorName, BlockIndex, ChunkIndex, ChunkKey, JobId, Span, Step

JOB = JobId("ftjob-1")


def keys_of(block: int, num_chunks: int) -> tuple[ChunkKey, ...]:
    return tuple(ChunkKey(BlockIndex(block), ChunkIndex(i)) for i in range(num_chunks))


def use_of(block: int, *, step: int = 1, round_index: int = 0, phase: Phase = Phase.FORWARD) -> ParamUse:
    return ParamUse(Step(step), phase, round_index, BlockIndex(block), BlockIndex(block))


def slots(number: int) -> list[Span]:
    return [Span(4096 * i, 4096) for i in range(number)]


def request(rank: int, use: ParamUse, keys: tuple[ChunkKey, ...], num_users: int = 2) -> RequestParams:
    return RequestParams(
        job=JOB, step=Step(0), reply_to=ActorName(f"gpu-{rank}"), use=use, num_users=num_users, keys=keys
    )


def copied(rank: int, use: ParamUse, keys: tuple[ChunkKey, ...]) -> ParamsCopied:
    return ParamsCopied(job=JOB, step=use.step, actor=ActorName(f"gpu-{rank}"), use=use, keys=keys)


def read_keys(actions: ParamActions) -> list[ChunkKey]:
    return [key for read in actions.reads for key in read.spans]


def test_a_chunk_is_read_once_and_its_slot_is_free_when_the_last_has_copied() -> None:
    turns = ParamTurns(slots(1), batch=1, num_kept=0)
    use, (key,) = use_of(0), keys_of(0, 1)
    other, (later,) = use_of(1), keys_of(1, 1)
    assert read_keys(turns.request(request(0, use, (key,)))) == [key]
    assert turns.arrived(use, key).arrived == [(ActorName("gpu-0"), use, (ParamChunk(key, slots(1)[0], True),))]
    turns.copied(copied(0, use, (key,)))
    assert turns.request(request(0, other, (later,), 1)).reads == []
    assert turns.describe() == "params of block 0 for step 1 wait for a GPU worker that is behind"
    actions = turns.request(request(1, use, (key,)))
    assert (actions.reads, actions.arrived) == (
        [],
        [(ActorName("gpu-1"), use, (ParamChunk(key, slots(1)[0], True),))],
    )
    assert turns.describe() == "params of block 0 for step 1 wait to be copied by gpu-1"
    assert read_keys(turns.copied(copied(1, use, (key,)))) == [later]


def test_a_use_that_no_worker_needs_is_forgotten() -> None:
    turns = ParamTurns(slots(1), batch=1, num_kept=0)
    for rank in (0, 1):
        actions = turns.request(request(rank, use_of(0), ()))
        assert (actions.reads, actions.arrived) == ([], [])
    assert turns.describe() == ""
    assert not turns._uses


def test_a_gpu_worker_that_still_has_its_params_keeps_no_slot() -> None:
    turns = ParamTurns(slots(1), batch=1, num_kept=0)
    use, (key,) = use_of(0), keys_of(0, 1)
    turns.request(request(0, use, ()))
    assert read_keys(turns.request(request(1, use, (key,)))) == [key]
    turns.arrived(use, key)
    turns.copied(copied(1, use, (key,)))
    assert not turns._uses


def test_who_is_ahead_leaves_slots_to_those_behind() -> None:
    turns = ParamTurns(slots(4), batch=2, num_kept=2)
    ahead, behind = keys_of(1, 4), keys_of(0, 4)
    assert read_keys(turns.request(request(0, use_of(1), ahead))) == list(ahead[:2])
    assert read_keys(turns.request(request(1, use_of(0), behind, 1))) == list(behind[:2])
    for key in behind[:2]:
        turns.arrived(use_of(0), key)
    assert read_keys(turns.copied(copied(1, use_of(0), behind[:2]))) == list(behind[2:])


def test_cached_params_are_read_once_and_told_to_all() -> None:
    (key,) = keys_of(0, 1)
    own = Span(4096 * 9, 4096)
    turns = ParamTurns(slots(1), batch=1, num_kept=0, cached={key: own})
    first, second = use_of(0), use_of(0, phase=Phase.BACKWARD)
    (read,) = turns.request(request(0, first, (key,), 0)).reads
    assert read.spans == {key: own}
    assert turns.request(request(1, first, (key,), 0)).reads == []
    other, (later,) = use_of(1), keys_of(1, 1)
    assert turns.request(request(0, other, (later,), 1)).reads == []  # a first read takes a slot until it is over
    actions = turns.arrived(first, key)
    chunks = (ParamChunk(key, own, False),)
    assert actions.arrived == [(ActorName(f"gpu-{rank}"), first, chunks) for rank in (0, 1)]
    assert read_keys(actions) == [later]
    assert turns.request(request(1, second, (key,), 0)).arrived == [(ActorName("gpu-1"), second, chunks)]


@dataclass
class Worker:
    """A GPU worker that asks for the params of its uses in order, a few ahead, and computes use after use."""

    rank: int
    program: list[ParamUse]
    speed: float
    window: int
    asked: int = 0
    done: int = 0
    missing: dict[ParamUse, set[ChunkKey]] = field(default_factory=dict)
    held: dict[ParamUse, list[ChunkKey]] = field(default_factory=dict)


class Box:
    """All messages between the workers and the turns, in any order that keeps those of one sender.

    `boxes`: those of a job in stages before this one, in the order of the blocks. `ranks`: the GPU workers of each box.
    `like`: one of the boxes.
    """

    def __init__(
        self,
        seed: int,
        boxes: "list[Box] | None" = None,
        ranks: tuple[int, ...] = (),
        like: "Box | None" = None,
    ) -> None:
        choose = self.choose = random.Random(seed)
        most, num_blocks = choose.randint(1, 4), choose.randint(1, 5)
        self.boxes = [self] if boxes is None else boxes
        self.ranks = ranks or (most,)
        self.index, self.num_boxes, most = 0 if boxes is None else len(boxes), len(self.ranks), max(self.ranks)
        num_ranks = self.ranks[self.index]
        self.chunks = {block: keys_of(block, choose.randint(1, 6)) for block in range(num_blocks)}
        self.streamed = {block for block in range(num_blocks) if choose.random() < 0.3}
        num_groups, num_evaluated = choose.randint(most, 2 * most + 1), choose.randint(0, most + 1)
        if like is not None:
            num_groups, num_evaluated = like.sizes
        self.sizes = num_groups, num_evaluated
        batch = choose.randint(1, 3)
        num_kept = max((batch, *(len(self.chunks[block]) for block in self.streamed)))
        self.num_slots = num_kept + choose.randint(0, 5)
        self.turns = ParamTurns(slots(self.num_slots), batch=batch, num_kept=num_kept)
        self.num_reads: dict[tuple[ParamUse, ChunkKey], int] = {}
        self.num_users: dict[ParamUse, int] = {}
        self.workers = []
        for rank in range(num_ranks):
            program = self._program(rank, num_groups, num_evaluated)
            for use in program:
                self.num_users[use] = self.num_users.get(use, 0) + 1
            self.workers.append(Worker(rank, program, choose.choice((1.0, 1.0, 0.1)), choose.randint(1, 3)))
        self.reading: list[tuple[ParamUse, ChunkKey]] = []
        self.to_turns: list[deque[RequestParams | ParamsCopied]] = [deque() for _ in self.workers]
        self.to_workers: list[deque[tuple[ParamUse, tuple[ParamChunk, ...]]]] = [deque() for _ in self.workers]
        self.skips = choose.choice((0.0, 0.3))

    def _program(self, rank: int, num_groups: int, num_evaluated: int) -> list[ParamUse]:
        program, num_ranks = [], self.ranks[self.index]
        for step in (1, 2):
            for group, goes_forward in passes_of_step(self.index, self.ranks, num_groups):
                if group % num_ranks == rank:
                    order = sorted(self.chunks, reverse=not goes_forward)
                    phase, index = Phase.FORWARD if goes_forward else Phase.BACKWARD, group // num_ranks
                    program += [use_of(block, step=step, round_index=index, phase=phase) for block in order]
            for round_index in range(len(range(rank, num_evaluated, num_ranks))):
                program += [
                    use_of(block, step=step, round_index=round_index, phase=Phase.EVALUATE) for block in self.chunks
                ]
        return program

    def run(self) -> None:
        while any(worker.done < len(worker.program) for box in self.boxes for worker in box.workers):
            moves = [move for box in self.boxes for move in box._moves()]
            assert moves, f"everybody waits: {[box.turns.describe() for box in self.boxes]}"
            self.choose.choice(moves)()
        while moves := [move for box in self.boxes for move in box._moves()]:
            self.choose.choice(moves)()
        for box in self.boxes:
            assert not box.turns._uses
            assert len(box.turns._free) == box.num_slots
            assert set(box.num_reads.values()) <= {1}

    def _moves(self) -> Iterator[Callable[[], None]]:
        for worker in self.workers:
            if worker.asked < min(len(worker.program), worker.done + worker.window):
                yield functools.partial(self._ask, worker)
            if self._can_compute(worker) and self.choose.random() < worker.speed:
                yield functools.partial(self._compute, worker)
            if self.to_turns[worker.rank]:
                yield functools.partial(self._deliver, worker)
            if self.to_workers[worker.rank]:
                yield functools.partial(self._copy, worker)
        for i in range(len(self.reading)):
            yield functools.partial(self._arrive, i)
        if any(self._can_compute(worker) for worker in self.workers):
            yield lambda: None  # a slow worker may take its time

    def _deliver(self, worker: Worker) -> None:
        message = self.to_turns[worker.rank].popleft()
        if isinstance(message, RequestParams):
            self._do(self.turns.request(message))
        else:
            self._do(self.turns.copied(message))

    def _arrive(self, index: int) -> None:
        self._do(self.turns.arrived(*self.reading.pop(index)))

    def _can_compute(self, worker: Worker) -> bool:
        if worker.done == worker.asked:
            return False
        # In the backward pass a worker needs the sums of the worker before it.
        use, num_ranks = worker.program[worker.done], len(self.workers)
        group = use.round_index * num_ranks + worker.rank
        if use.phase is Phase.BACKWARD and group > 0:
            before = self.workers[(group - 1) % num_ranks]
            if use._replace(round_index=(group - 1) // num_ranks) not in before.program[: before.done]:
                return False
        return not worker.missing[use] and self._has_results(worker, use)

    def _has_results(self, worker: Worker, use: ParamUse) -> bool:
        """Returns whether the box before or after has computed what the first use of a pass takes."""
        goes_forward = use.phase is not Phase.BACKWARD
        first, last = min(self.chunks), max(self.chunks)
        neighbour = self.index + (-1 if goes_forward else 1)
        if use.block != (first if goes_forward else last) or not 0 <= neighbour < self.num_boxes:
            return True
        other = self.boxes[neighbour]
        block = BlockIndex(max(other.chunks) if goes_forward else min(other.chunks))
        group, num_ranks = use.round_index * len(self.workers) + worker.rank, len(other.workers)
        there = other.workers[group % num_ranks]
        taken = use._replace(user=block, block=block, round_index=group // num_ranks)
        return taken in there.program[: there.done]

    def _ask(self, worker: Worker) -> None:
        use = worker.program[worker.asked]
        worker.asked += 1
        keys = () if self.choose.random() < self.skips else self.chunks[use.block]
        worker.missing[use] = set(keys)
        self.to_turns[worker.rank].append(request(worker.rank, use, keys, self.num_users[use]))

    def _do(self, actions: ParamActions) -> None:
        for read in actions.reads:
            for key in read.spans:
                self.num_reads[(read.use, key)] = self.num_reads.get((read.use, key), 0) + 1
                self.reading.append((read.use, key))
        for actor, use, chunks in actions.arrived:
            self.to_workers[int(actor[4:])].append((use, chunks))

    def _copy(self, worker: Worker) -> None:
        use, chunks = self.to_workers[worker.rank].popleft()
        worker.missing[use].difference_update(chunk.key for chunk in chunks)
        worker.held.setdefault(use, []).extend(chunk.key for chunk in chunks)
        if use.block not in self.streamed:
            self._release(worker, use)

    def _compute(self, worker: Worker) -> None:
        use = worker.program[worker.done]
        worker.done += 1
        if worker.held.get(use):
            self._release(worker, use)

    def _release(self, worker: Worker, use: ParamUse) -> None:
        self.to_turns[worker.rank].append(copied(worker.rank, use, tuple(worker.held.pop(use))))


@pytest.mark.short("0", "50", "100")
@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_no_worker_waits_for_ever_whatever_the_order_and_the_speeds(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        Box(seed).run()


@pytest.mark.parametrize(
    "first_seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 200, 10))]
)
def test_no_worker_of_several_boxes_waits_for_ever(first_seed: int) -> None:
    """Each box has params of its own, and its workers wait for those of the boxes before and after it."""
    for seed in range(first_seed, first_seed + 10):
        choose, boxes = random.Random(seed), list[Box]()
        ranks = tuple(choose.randint(1, 4) for _ in range(2 + seed % 2))
        ranks = ranks if seed % 3 else (ranks[0],) * len(ranks)
        for _ in ranks:
            boxes.append(Box(seed * 10 + len(boxes), boxes, ranks, next(iter(boxes), None)))
        boxes[0].run()
