"""Levels of memory: cut to a time, and added up."""

from windlass.actors.timeline.memory_levels import Level, memory_of
from windlass.engine.memory_plan.memory_tier import MemoryTier

PARAMS = Level(MemoryTier.HOST, "params", 100, ((0.0, 0), (1.0, 60), (3.0, 20)))
GRADIENTS = Level(MemoryTier.HOST, "gradients", 50, ((0.0, 10), (2.0, 30), (3.0, 50)))
RUNNING = Level(MemoryTier.DEVICE, "running operation", None, ((0.0, 7),))


def test_a_level_that_is_cut_begins_with_what_was_in_use() -> None:
    assert PARAMS.between(2.0, 4.0).points == ((2.0, 60), (3.0, 20))
    assert PARAMS.between(1.0, 3.0).points == ((1.0, 60), (3.0, 20))
    assert PARAMS.between(1.0, 2.9).points == ((1.0, 60),)
    assert PARAMS.between(5.0, 9.0) == PARAMS._replace(points=((5.0, 20),))


def test_kinds_of_a_tier_are_put_together_and_what_changes_at_once_is_one_change() -> None:
    memory = memory_of([RUNNING, PARAMS, GRADIENTS])
    assert list(memory) == [MemoryTier.DEVICE, MemoryTier.HOST]
    assert memory[MemoryTier.HOST].timeline == [
        (0.0, {"params": 0, "gradients": 10}),
        (1.0, {"params": 60, "gradients": 10}),
        (2.0, {"params": 60, "gradients": 30}),
        (3.0, {"params": 20, "gradients": 50}),
    ]
    # If the changes at 3 s were two, the level between them would be 110.
    assert (memory[MemoryTier.HOST].peak_nbytes, memory[MemoryTier.HOST].allocated_nbytes) == (90, 150)


def test_partly_allocated_tier_has_unknown_allocation() -> None:
    memory = memory_of([RUNNING, Level(MemoryTier.DEVICE, "params", 40, ((0.0, 40),))])[MemoryTier.DEVICE]
    assert (memory.peak_nbytes, memory.allocated_nbytes) == (47, None)
