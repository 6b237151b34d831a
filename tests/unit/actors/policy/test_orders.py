"""For any order in which actors finish, the policy keeps the rules on which exactness and restarts depend."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.policy.jobs import make_shape
from tests.support.policy.world import World, deliver_all_but
from windlass.actors.messages import GradChunk, Message, Phase
from windlass.actors.policy import rank_queue
from windlass.actors.policy.config import Operation, SchedulerConfig, program
from windlass.actors.policy.pending_replies import UnexpectedEventError
from windlass.actors.worker_policy.block_queue import QueueOrder

ORDERS: dict[str, dict[str, Any]] = {
    "active": {"clip_norm": None, "keeps_grads": False},
    "kept": {"clip_norm": None, "keeps_grads": True},
    "clipped": {"clip_norm": 1.0, "keeps_grads": True},
    "alone": {"clip_norm": None, "keeps_grads": True, "overlaps_steps": False},
    "clipped-alone": {"clip_norm": 1.0, "keeps_grads": True, "overlaps_steps": False},
    "active-steps-alone": {"clip_norm": None, "keeps_grads": False, "overlaps_steps": False},
}
# The tiers of states and the commit interval. Blocks 0 and 1 exist in every job.
TIERS: list[dict[str, Any]] = [
    {},
    {"spilled_blocks": frozenset({1, 2, 3, 4, 5})},
    {"spilled_blocks": frozenset({2, 3, 4, 5})},
    {"commit_every": 3},
    {"host_blocks": frozenset(range(6)), "num_ssds": 0},
    *(
        {"host_blocks": frozenset(host), "device_blocks": frozenset(device), "commit_every": commit_every}
        for host, device in [((0, 2), ()), ((), (1, 2)), ((1,), (0,)), ((0, 1, 3), (2, 4))]
        for commit_every in (1, 2, 3)
    ),
]


def tiered_shape(order: dict[str, Any], tiers: dict[str, Any], **options: Any) -> SchedulerConfig:
    """A small job, with those of the tiers' blocks that it has. Only kept gradients can spill.

    With several ranks, blocks are resident in host memory instead of on the device.
    """
    if "spilled_blocks" in tiers and not order["keeps_grads"]:
        tiers = {}
    there = frozenset(range(len(options["chunks_per_block"])))
    tiers = {name: each & there if isinstance(each, frozenset) else each for name, each in tiers.items()}
    ranks = options["num_ranks"]
    if (ranks if isinstance(ranks, int) else max(ranks)) > 1 and "device_blocks" in tiers:
        tiers |= {"host_blocks": tiers["host_blocks"] | tiers["device_blocks"], "device_blocks": frozenset()}
    return make_shape(**(order | options | tiers))


shapes = st.builds(
    tiered_shape,
    num_ranks=st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))),
    cuts=st.lists(st.integers(1, 5), max_size=2).map(tuple),
    order=st.sampled_from(list(ORDERS.values())),
    tiers=st.sampled_from(TIERS),
    max_bad_steps=st.integers(0, 3),
    chunks_per_block=st.lists(st.integers(1, 3), min_size=3, max_size=6).map(tuple),
    tied=st.booleans(),
    queues=st.sampled_from(QueueOrder),
    num_optimizers=st.integers(1, 2),
    num_ssds=st.integers(1, 2),
    total_steps=st.integers(1, 7),
    num_groups=st.integers(1, 6),
    num_evaluation_groups=st.integers(0, 4),
    evaluate_every=st.integers(0, 2),
    evaluation_decides=st.booleans(),
    checkpoint_every=st.integers(0, 4),
    max_prefetched=st.integers(1, 4),
    max_offloading=st.integers(1, 3),
    max_updating=st.integers(1, 7),
    max_updating_on_device=st.integers(1, 3),
    max_flushing=st.integers(1, 3),
)
# Events of slow actors come only now and then while there are others. Bad gradients are (step, block); mostly few,
# sometimes all of several steps.
bad_gradients = st.one_of(
    st.just(frozenset[tuple[int, int]]()),
    st.frozensets(st.tuples(st.integers(1, 7), st.integers(0, 3)), max_size=4),
    st.frozensets(st.integers(1, 7)).map(lambda steps: frozenset((step, b) for step in steps for b in range(6))),
)
slow_actors = st.sets(
    st.sampled_from(["compute", "gradient", "update", "flush", "commit", "export", "gpu-0", "gpu-1", "gpu-2"])
)
best_steps = st.frozensets(st.integers(1, 7), max_size=4)
finishes = st.one_of(st.none(), st.integers(1, 7))
wanted = st.frozensets(st.integers(0, 150), max_size=3)
many = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(
    world: World,
    order: random.Random,
    slow: set[str],
    stop_at: int | None = None,
    want_at: frozenset[int] = frozenset(),
) -> None:
    """Delivers events in a random order until none is left.

    `want_at`: the number of events after which a checkpoint is due.
    """
    world.start()
    num = 0
    while choices := world.choices():
        if stop_at is not None and num >= stop_at:
            world.stop()  # again after each event, as the shell does
        if num in want_at and world.committed >= 0:
            world.want_checkpoint()
        fast = [c for c in choices if c.answers.split()[0] not in slow and c.event.actor not in slow]
        world.deliver(order.choice(fast if fast and order.random() < 0.9 else choices))
        num += 1


@given(shape=shapes, seed=st.integers(0, 2**32), slow=slow_actors, bad=bad_gradients, scales_loss=st.booleans())
@many
def test_every_order_ends_with_everything_committed(
    shape: SchedulerConfig, seed: int, slow: set[str], bad: frozenset[tuple[int, int]], scales_loss: bool
) -> None:
    world = World(shape, bad=bad, scales_loss=scales_loss)
    run(world, random.Random(seed), slow)
    world.check_end()


@given(shape=shapes, seed=st.integers(0, 2**32), slow=slow_actors, stop_at=st.integers(0, 120), bad=bad_gradients)
@many
def test_a_stop_at_any_moment_ends_after_the_step_that_had_begun(
    shape: SchedulerConfig, seed: int, slow: set[str], stop_at: int, bad: frozenset[tuple[int, int]]
) -> None:
    world = World(shape, bad=bad)
    run(world, random.Random(seed), slow, stop_at)
    world.check_end()


@given(shape=shapes, seed=st.integers(0, 2**32), slow=slow_actors, data=st.data(), bad=bad_gradients)
@many
def test_a_resumed_job_goes_on_at_the_next_step(
    shape: SchedulerConfig, seed: int, slow: set[str], data: st.DataObject, bad: frozenset[tuple[int, int]]
) -> None:
    """Also if the previous steps were skipped: the trainer's counts continue, too."""
    initial_step = data.draw(st.integers(0, shape.total_steps - 1))
    world = World(shape, initial_step, bad=bad, scales_loss=True)
    run(world, random.Random(seed), slow)
    world.check_end()
    trained = {Phase.FORWARD, Phase.HEAD, Phase.BACKWARD}
    assert min(step for step, phase, *_ in world.computed if phase in trained) == initial_step + 1


@given(
    shape=shapes,
    seed=st.integers(0, 2**32),
    slow=slow_actors,
    bad=bad_gradients,
    best=best_steps,
    finish_at=finishes,
    want_at=wanted,
    stop_at=st.one_of(st.none(), st.integers(0, 120)),
)
@many
def test_checkpoints_that_are_asked_for_come_before_the_next_step_and_an_early_end_has_its_model(
    shape: SchedulerConfig,
    seed: int,
    slow: set[str],
    bad: frozenset[tuple[int, int]],
    best: frozenset[int],
    finish_at: int | None,
    want_at: frozenset[int],
    stop_at: int | None,
) -> None:
    world = World(shape, bad=bad, best=best, finish_at=finish_at)
    run(world, random.Random(seed), slow, stop_at, want_at)
    world.check_end()
    if shape.evaluation_decides and shape.num_evaluation_groups and stop_at is None and not world.failed:
        evaluated = {step for step, phase, *_ in world.expected if phase is Phase.EVALUATE_HEAD}
        assert best & evaluated <= {step for step, _ in world.exports}
        assert world.exports[-1] == (finish_at if finish_at in evaluated else shape.total_steps, "/models/out")


def test_a_bad_gradient_that_is_reported_after_all_updates_commits_nothing() -> None:
    """Without SSDs, a step counts as committed once it is over."""
    world = World(make_shape(**ORDERS["active"], host_blocks=frozenset(range(4)), num_ssds=0), bad=frozenset({(2, 0)}))
    world.start()
    while choices := world.choices():
        world.deliver(next((each for each in choices if not each.answers.startswith("gradient 2 0")), choices[0]))
    assert world.failed
    assert set(world.content) == {2}  # every block is updated, and the policy refuses the report
    assert world.pipeline.committed == 1


@given(shape=shapes, seed=st.integers(0, 2**32), data=st.data(), bad=bad_gradients)
@many
def test_an_event_that_comes_twice_is_refused(
    shape: SchedulerConfig, seed: int, data: st.DataObject, bad: frozenset[tuple[int, int]]
) -> None:
    world, order = World(shape, bad=bad), random.Random(seed)
    world.start()
    for _ in range(data.draw(st.integers(1, 80))):
        if not (choices := world.choices()):
            break
        world.deliver(order.choice(choices))
    with pytest.raises(UnexpectedEventError):
        world.pipeline.handle(order.choice(world.delivered), 0.0)


class _CopyableProgram(Iterator[Operation]):
    """The job's program as a position in a list, because a generator cannot be copied."""

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self.operations, self.place = operations, 0

    def __next__(self) -> Operation:
        if self.place == len(self.operations):
            raise StopIteration
        self.place += 1
        return self.operations[self.place - 1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CopyableProgram":
        twin = _CopyableProgram(self.operations)
        twin.place = self.place
        return twin


Bad = frozenset[tuple[int, int]]
FIFO: dict[str, Any] = {"queues": QueueOrder.FIFO}
HOST, DEVICE, MIXED = ({0, 1, 2}, ()), ((), {0, 1, 2}), ({0}, {2})


def resident(where: tuple[Any, Any], commit_every: int, **options: Any) -> dict[str, Any]:
    """Three blocks, some of which are resident in memory."""
    host, device = map(frozenset, where)
    num_steps = {"total_steps": commit_every + 1, "chunks_per_block": (1,) * 3}
    return {**num_steps, "host_blocks": host, "device_blocks": device, "commit_every": commit_every, **options}


NO_SSDS: dict[str, Any] = {"host_blocks": frozenset(range(4)), "num_ssds": 0}
GROUPS: dict[str, Any] = {"num_groups": 2, "chunks_per_block": (1,) * 3}
RANKS: dict[str, Any] = {"num_ranks": 2, "num_groups": 2, "chunks_per_block": (1,) * 2}
TINY: dict[str, tuple[dict[str, Any], Bad]] = {
    "active": (ORDERS["active"], frozenset()),
    "kept": (ORDERS["kept"], frozenset()),
    "alone": (ORDERS["alone"], frozenset()),
    "active-steps-alone": (ORDERS["active-steps-alone"], frozenset()),
    "fifo-active": (ORDERS["active"] | FIFO, frozenset()),
    "fifo-clipped-first-skipped": (ORDERS["clipped"] | FIFO, frozenset({(1, 2)})),
    "fifo-spilled": (ORDERS["kept"] | FIFO | {"spilled_blocks": frozenset({1, 2, 3})}, frozenset()),
    "fifo-mixed-every-2-alone": (ORDERS["alone"] | FIFO | resident(MIXED, 2), frozenset()),
    "clipped-first-skipped": (ORDERS["clipped"], frozenset({(1, 2)})),
    "clipped-alone-second-skipped": (ORDERS["clipped-alone"], frozenset({(2, 0)})),
    "kept-both-skipped": (ORDERS["kept"], frozenset({(1, 0), (2, 3)})),
    "spilled": (ORDERS["kept"] | {"spilled_blocks": frozenset({1, 2, 3})}, frozenset()),
    "spilled-first-skipped": (ORDERS["kept"] | {"spilled_blocks": frozenset({1, 2, 3})}, frozenset({(1, 1)})),
    "spilled-second-skipped": (ORDERS["kept"] | {"spilled_blocks": frozenset({2, 3})}, frozenset({(2, 3)})),
    "host-active": (ORDERS["active"] | resident(HOST, 1), frozenset()),
    "no-ssds-active": (ORDERS["active"] | NO_SSDS, frozenset()),
    "no-ssds-first-skipped": (ORDERS["clipped"] | NO_SSDS, frozenset({(1, 2)})),
    "no-ssds-checkpoint-and-evaluation": (
        ORDERS["kept"] | NO_SSDS | {"checkpoint_every": 1, "num_evaluation_groups": 1, "evaluate_every": 1},
        frozenset(),
    ),
    "groups-active": (ORDERS["active"] | GROUPS, frozenset()),
    "groups-clipped-first-skipped": (ORDERS["clipped"] | GROUPS, frozenset({(1, 2)})),
    "groups-fifo-alone": (ORDERS["alone"] | FIFO | GROUPS, frozenset()),
    "groups-spilled": (ORDERS["kept"] | GROUPS | {"spilled_blocks": frozenset({1, 2})}, frozenset()),
    "groups-mixed-every-2-active": (ORDERS["active"] | resident(MIXED, 2, num_groups=2), frozenset()),
    "groups-mixed-every-2-second-skipped": (
        ORDERS["kept"] | resident(MIXED, 2, num_groups=2),
        frozenset({(2, 0)}),
    ),
    "ranks-active": (ORDERS["active"] | RANKS, frozenset()),
    "ranks-clipped-first-skipped": (ORDERS["clipped"] | RANKS, frozenset({(1, 1)})),
    "ranks-alone": (ORDERS["alone"] | RANKS, frozenset()),
    "ranks-three-groups-spilled": (
        ORDERS["kept"] | RANKS | {"num_groups": 3, "spilled_blocks": frozenset({1})},
        frozenset(),
    ),
    "ranks-evaluation": (
        ORDERS["active"] | RANKS | {"num_evaluation_groups": 2, "evaluate_every": 1},
        frozenset(),
    ),
    "ranks-evaluation-and-checkpoint": (
        ORDERS["active"] | RANKS | {"num_evaluation_groups": 3, "evaluate_every": 1, "checkpoint_every": 1},
        frozenset(),
    ),
    "ranks-without-groups-evaluate": (
        ORDERS["active"] | RANKS | {"num_groups": 1, "num_evaluation_groups": 2, "evaluate_every": 1},
        frozenset(),
    ),
    "host-every-2-active": (ORDERS["active"] | resident(HOST, 2), frozenset()),
    "device-every-2-active": (ORDERS["active"] | resident(DEVICE, 2), frozenset()),
    "mixed-active": (ORDERS["active"] | resident(MIXED, 1), frozenset()),
    "mixed-every-2-active": (ORDERS["active"] | resident(MIXED, 2), frozenset()),
    "mixed-every-3-active": (ORDERS["active"] | resident(MIXED, 3), frozenset()),
    "mixed-every-2-alone": (ORDERS["alone"] | resident(MIXED, 2), frozenset()),
    "mixed-every-2-clipped": (ORDERS["clipped"] | resident(MIXED, 2), frozenset()),
    "mixed-every-2-first-skipped": (ORDERS["kept"] | resident(MIXED, 2), frozenset({(1, 0)})),
    "mixed-every-2-second-skipped": (ORDERS["kept"] | resident(MIXED, 2), frozenset({(2, 0)})),
    "mixed-every-2-third-skipped": (ORDERS["kept"] | resident(MIXED, 2), frozenset({(3, 1)})),
    "host-every-3-second-and-third-skipped": (ORDERS["kept"] | resident(HOST, 3), frozenset({(2, 0), (3, 1)})),
    "host-every-2-all-skipped": (ORDERS["kept"] | resident(HOST, 2), frozenset({(1, 0), (2, 2), (3, 1)})),
    "host-every-2-checkpoint-and-evaluation": (
        ORDERS["kept"] | resident(HOST, 2, checkpoint_every=3, num_evaluation_groups=1, evaluate_every=1),
        frozenset({(1, 2)}),
    ),
}


LONG = {
    "active",
    "ranks-evaluation",
    "ranks-alone",
    "ranks-evaluation-and-checkpoint",
    "ranks-three-groups-spilled",
    "no-ssds-first-skipped",
    "spilled-first-skipped",
    "kept-both-skipped",
    "alone",
    "kept",
    "clipped-first-skipped",
    "groups-active",
    "groups-fifo-alone",
    "spilled",
    "active-steps-alone",
    "fifo-active",
    "fifo-spilled",
    "no-ssds-active",
    "groups-mixed-every-2-active",
    "device-every-2-active",
    "host-active",
    "spilled-second-skipped",
    "mixed-active",
    "mixed-every-2-active",
    "mixed-every-2-alone",
    "mixed-every-2-third-skipped",
    "mixed-every-3-active",
    "host-every-2-active",
    "host-every-2-checkpoint-and-evaluation",
    "host-every-3-second-and-third-skipped",
}


def explore(root: World, *, wants: bool = False) -> tuple[int, int]:
    """Visits every state that a world can reach, with a stop in each. Returns the number of ends and of states.

    `wants`: a checkpoint may be due at any moment, once.
    """
    seen: set[tuple[frozenset[str], frozenset[str]]] = set()
    frontier: list[tuple[World, frozenset[str]]] = [(root, frozenset())]
    num_ends = 0
    while frontier:
        world, history = frontier.pop()
        choices = world.choices()
        # Past events and pending instructions determine all that follows.
        state = (history, frozenset(choice.answers for choice in choices))
        if state in seen:
            continue
        seen.add(state)
        if not choices:
            world.check_end()
            num_ends += 1
        stopped = world.fork()
        stopped.stop()
        deliver_all_but(stopped)
        stopped.check_end()
        if wants and choices and world.committed >= 0 and not any(each.startswith("want") for each in history):
            twin = world.fork()
            frontier.append((twin, history | {f"want {twin.want_checkpoint()}"}))
        for place, choice in enumerate(choices):
            twin = world if place == len(choices) - 1 else world.fork()
            twin.deliver(choice)
            frontier.append((twin, history | {choice.answers}))
    return num_ends, len(seen)


@pytest.fixture
def copyable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_queue, "program", lambda *options: _CopyableProgram(tuple(program(*options))))
    # shared by all copies of a world, because copying them would dominate the run time
    for frozen in (Message, GradChunk):
        monkeypatch.setattr(frozen, "__deepcopy__", lambda it, _memo: it, raising=False)


@pytest.mark.usefixtures("copyable")
@pytest.mark.parametrize("num", [1, pytest.param(2, marks=pytest.mark.long)], ids="{}-of-each".format)
@pytest.mark.parametrize(
    ("options", "bad"),
    [pytest.param(*case, marks=[pytest.mark.long] if name in LONG else [], id=name) for name, case in TINY.items()],
)
def test_all_orders_of_a_tiny_job(options: dict[str, Any], bad: Bad, num: int) -> None:
    """Every state that a few blocks and steps can reach, with a stop in each of them."""
    num_blocks = len(options.get("chunks_per_block", (1,) * 4))
    several = {"num_optimizers": num, "num_ssds": num, "max_prefetched": num + 1}
    shape = make_shape(tied=True, **(several | options | {"chunks_per_block": (num,) * num_blocks}))
    root = World(shape, bad=bad)
    root.start()
    num_ends, num_states = explore(root)
    assert num_ends == 1
    assert num_states > 40


DECIDES: dict[str, Any] = {
    "chunks_per_block": (1,) * 3,
    "evaluation_decides": True,
    "num_evaluation_groups": 1,
    "evaluate_every": 1,
    "max_prefetched": 4,  # more than the operations of an evaluation
    "total_steps": 2,
}


@pytest.mark.short("no SSDs-first best-to the end")
@pytest.mark.usefixtures("copyable")
@pytest.mark.parametrize(
    ("best", "finish_at"),
    [
        pytest.param(frozenset({1}), None, id="first best-to the end"),
        pytest.param(frozenset(), 1, id="none best-ends early", marks=pytest.mark.long),
        pytest.param(frozenset(), None, id="none best-to the end", marks=pytest.mark.long),
        pytest.param(frozenset({1}), 1, id="first best-ends early", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("options", "bad"),
    [
        (ORDERS["active"], frozenset()),
        pytest.param(ORDERS["clipped"], frozenset({(1, 2)}), marks=pytest.mark.long),
        pytest.param(
            *(ORDERS["kept"] | {"host_blocks": frozenset({0, 2}), "commit_every": 2}, frozenset()),
            marks=pytest.mark.long,
        ),
        (ORDERS["active"] | {"host_blocks": frozenset(range(3)), "num_ssds": 0, "commit_every": 2}, frozenset()),
        pytest.param(ORDERS["active"] | RANKS | {"num_evaluation_groups": 2}, frozenset(), marks=pytest.mark.long),
    ],
    ids=["active", "first skipped", "host every 2", "no SSDs", "ranks"],
)
def test_all_orders_of_a_tiny_job_whose_evaluations_decide(
    options: dict[str, Any], bad: Bad, best: frozenset[int], finish_at: int | None
) -> None:
    root = World(make_shape(**(DECIDES | options)), bad=bad, best=best, finish_at=finish_at)
    root.start()
    num_ends, num_states = explore(root, wants=True)
    assert num_ends > 1  # with a checkpoint at one step, at another, and at none
    assert num_states > 40
