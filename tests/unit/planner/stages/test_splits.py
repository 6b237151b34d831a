"""Divisions of a model's layers over boxes."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from tests.support.planner.stage_jobs import SHAPE, box_plans, kind_of, server
from windlass.planner.stages.box_plans import BoxPlan, BoxPlans, Rounds, Run
from windlass.planner.stages.pipeline import Pipeline, StageTimes
from windlass.planner.stages.splits import Division, Splitter, in_proportion, planned_stages, run_of

NUM_LAYERS = 12
HEAD_LAYERS = 0.8  # layers that compute as much as the head


@dataclass(kw_only=True)
class PretendBox(BoxPlans):
    """A box whose times are made up: more than in proportion to its layers, and none for more than it has room for."""

    layer_s: float
    crowded_s: float  # of each layer beyond half of the room, for each of these
    room: int

    def of(self, run: Run, rounds: Rounds, *, below: float = math.inf) -> BoxPlan | None:
        """Returns made-up times."""
        last = run.stage == run.num_stages - 1
        number = run.stop - run.first - (run.first == 0) - last
        if number > self.room:
            return None
        crowded = max(0.0, number - self.room / 2)
        round_s = self.layer_s * (number + (HEAD_LAYERS if last else 0.0)) + self.crowded_s * crowded**2
        alone_s = round_s * rounds.number
        if alone_s >= below:
            return None
        times = StageTimes(
            round_s=round_s,
            computed_s=0.9 * round_s,
            beside_updates_s=0.3 * round_s,
            updates_s=0.2 * alone_s,
            first_update_s=0.0,
            alone_s=alone_s,
        )
        return BoxPlan(solution=cast("Any", None), times=times)


def divisions(num_boxes: int) -> Iterator[Division]:
    """Yields all divisions of the layers."""
    for cuts in itertools.combinations(range(1, NUM_LAYERS), num_boxes - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, NUM_LAYERS)))


def splitter(boxes: tuple[BoxPlans, ...], rounds: Rounds, work_s: tuple[float, ...], *, crossing_s: float) -> Splitter:
    network = (1.0,) * len(boxes)
    pipeline = Pipeline(stages=(), num_rounds=rounds.number, crossing_nbytes=crossing_s, network_bytes=network)
    return Splitter(boxes=boxes, rounds=rounds, work_s=work_s, pipeline=pipeline)


def test_the_division_is_nearly_as_good_as_the_best_of_all() -> None:
    random_ = random.Random(4)
    shape = SHAPE.model_copy(update={"num_layers": NUM_LAYERS})
    kind = kind_of(server(), 1, shape=shape)
    profiles = box_plans(kind).profiles
    worse = []
    for _ in range(60):
        num_boxes = random_.randint(2, 4)
        boxes = tuple(
            PretendBox(
                kind=kind,
                profiles=profiles,
                layer_s=random_.choice([1.0, 1.0, 2.0, 3.0]),
                crowded_s=random_.choice([0.0, 0.1, 0.5]),
                room=random_.choice([3, 6, 12, 12]),
            )
            for _ in range(num_boxes)
        )
        rounds = Rounds(num_ranks=1, num_microbatches=8, group_size=random_.choice([1, 2, 8]))
        search = splitter(
            boxes, rounds, tuple(NUM_LAYERS * box.layer_s * rounds.number for box in boxes), crossing_s=0.05
        )
        every = [planned_stages(boxes, rounds, division, search.pipeline) for division in divisions(num_boxes)]
        steps_s = [planned.step_s for planned in every if planned is not None]
        found = search.best(known=None, worth_refining=math.inf)
        assert (found is None) == (not steps_s)
        if found is not None:
            worse.append(found.step_s / min(steps_s) - 1)
    assert len(worse) > 40
    assert max(worse) < 0.05
    assert sum(worse) / len(worse) < 0.005


def test_a_real_job_has_the_best_division_of_all() -> None:
    plans = box_plans(kind_of(server(), 2))
    rounds = Rounds(num_ranks=1, num_microbatches=8, group_size=1)
    search = splitter((plans, plans), rounds, (plans.least_work(rounds).passes_s,) * 2, crossing_s=1e-5)
    pairs = [(number, SHAPE.num_layers - number) for number in range(1, SHAPE.num_layers)]
    every = [planned_stages((plans, plans), rounds, pair, search.pipeline) for pair in pairs]
    found = search.best(known=None, worth_refining=math.inf)
    assert found is not None
    assert found.step_s == pytest.approx(min(planned.step_s for planned in every if planned is not None), rel=1e-3)


def test_layers_are_divided_in_proportion_to_speed_and_the_head_counts() -> None:
    assert in_proportion(80, [1.0, 1.0, 1.0, 1.0], like_head=0.0) == (20, 20, 20, 20)
    assert in_proportion(80, [1.0, 1.0], like_head=4.0) == (42, 38)
    assert in_proportion(9, [1.0, 2.0], like_head=0.0) == (6, 3)
    assert in_proportion(3, [1.0, 1.0, 1000.0], like_head=5.0) == (1, 1, 1)


def test_runs_of_a_division_are_all_blocks_in_order() -> None:
    runs = [run_of((2, 3, 1), box, (1, 1, 1)) for box in range(3)]
    assert [(run.first, run.stop) for run in runs] == [(0, 3), (3, 6), (6, 8)]
    assert (run_of((6,), 0, (1,)).first, run_of((6,), 0, (1,)).stop) == (0, 8)
