"""The memory that boxes lack for a job that does not fit them."""

from dataclasses import replace

from tests.support.planner.stage_jobs import box_plans, kind_of, server
from windlass.engine.memory_plan import MemoryTier
from windlass.planner.stages.box_plans import BoxPlans
from windlass.planner.stages.lacking import _has_room, _lacking, _rounds_that_save, lacks_of

EVEN = (3, 3)
LITTLE_NBYTES = 32 << 20  # of host memory: too little for one layer


def box_with(host_nbytes: int | None) -> BoxPlans:
    return box_plans(kind_of(server(), 1, host_memory_nbytes=host_nbytes))


def test_boxes_lack_what_they_need_with_the_rounds_that_save_most() -> None:
    boxes = [box_with(LITTLE_NBYTES)] * 2
    lacks = lacks_of(boxes, EVEN)
    assert [(lack.box, lack.run.first, lack.run.stop) for lack in lacks] == [(0, 0, 4), (1, 4, 8)]
    all_rounds = list(_rounds_that_save(boxes[0]))
    assert len(all_rounds) > 1
    totals = [sum(lack.nbytes for lack in _lacking(boxes, EVEN, rounds)) for rounds in all_rounds]
    assert sum(lack.nbytes for lack in lacks) == min(totals) < max(totals)


def test_box_with_what_it_lacked_has_room() -> None:
    boxes = [box_with(LITTLE_NBYTES)] * 2
    for lack in lacks_of(boxes, EVEN):
        missing = lack.shortfall.missing[MemoryTier.HOST]
        assert "of host memory" in lack.in_words("attic")
        rounds = [each for each in _rounds_that_save(boxes[0]) if not _has_room(boxes[0], lack.run, each)]
        enough = box_with(LITTLE_NBYTES + missing)
        assert any(_has_room(enough, lack.run, each) for each in rounds)
        short = box_with(LITTLE_NBYTES + missing - (1 << 20))
        assert not any(_has_room(short, lack.run, each) for each in rounds)


def test_box_with_room_for_the_rest_lacks_nothing() -> None:
    boxes = [box_with(LITTLE_NBYTES), box_with(None)]
    (lack,) = lacks_of(boxes, EVEN)
    assert (lack.box, lack.run.stop) == (0, 2), "one layer, with which the other box is not full"


def test_boxes_with_room_lack_nothing() -> None:
    boxes = [box_with(None)] * 2
    assert lacks_of([replace(boxes[0]), boxes[1]], EVEN) == []
