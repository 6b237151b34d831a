"""A plan over several boxes without a solver, for boxes that were not measured: even in params, and all on the SSDs."""

import itertools
from collections.abc import Sequence

from windlass.engine.memory_plan import Placement
from windlass.engine.model import ModelLayout
from windlass.planner.stages.box_plans import Rounds
from windlass.planner.stages.splits import Division, run_of
from windlass.planner.stages.stages_plan import StagePlan, StagesPlan
from windlass.planner.stages.stages_request import StagesRequest


def even_stages(request: StagesRequest, layout: ModelLayout, notes: Sequence[str]) -> StagesPlan:
    """Returns a plan in which all boxes have about as many params. The boxes keep the order of the request.

    As in a job on one box without a plan, all states rest on the SSDs, and the budgets decide the buffers. If the
    planner is to choose the number of GPUs, it is 1.
    """
    division = even_division([block.numel for block in layout.blocks], len(request.boxes))
    rounds = rounds_without_plan(request)
    ranks = tuple(min(rounds.num_ranks, box.num_ranks or rounds.num_ranks) for box in request.boxes)
    runs = [run_of(division, box, ranks) for box in range(len(division))]
    return StagesPlan(
        num_ranks=max(ranks),
        num_microbatches=rounds.num_microbatches,
        update_order=request.training.order_of_updates,
        cut_matrices=request.training.cut_matrices,
        step_s=None,
        stages=tuple(
            StagePlan(
                box=box.name,
                first_block=run.first,
                stop_block=run.stop,
                placement=Placement(group_size=rounds.group_size),
                num_optimizers=box.num_optimizers,
                num_ranks=None if num_ranks == max(ranks) else num_ranks,
                host_memory_nbytes=box.host_memory_nbytes,
                peak_gib={},
            )
            for box, run, num_ranks in zip(request.boxes, runs, ranks, strict=True)
        ),
        notes=tuple(notes),
    )


def even_division(numels: Sequence[int], num_boxes: int) -> Division:
    """Returns the division for which the sum of squares of the boxes' params is least. Each box has a layer at least.

    `numels`: of all blocks. The first box has the embedding, too, and the last one the head.
    """
    num_layers = len(numels) - 2
    assert 0 < num_boxes <= num_layers, "`check_division` has refused it"
    sums = list(itertools.accumulate(numels, initial=0))
    # By number of layers: the least sum for the boxes so far, and their division.
    best: dict[int, tuple[int, Division]] = {0: (0, ())}
    for box in range(num_boxes):
        is_last = box == num_boxes - 1
        longer: dict[int, tuple[int, Division]] = {}
        for before, (squares, division) in best.items():
            stops = [num_layers] if is_last else range(before + 1, num_layers - (num_boxes - box - 1) + 1)
            for stop in stops:
                first_block, stop_block = before + 1 if box else 0, stop + (2 if is_last else 1)
                total = squares + (sums[stop_block] - sums[first_block]) ** 2
                if stop not in longer or total < longer[stop][0]:
                    longer[stop] = total, (*division, stop - before)
        best = longer
    return best[num_layers][1]


def rounds_without_plan(request: StagesRequest) -> Rounds:
    """Returns the fewest equal rounds in which all boxes can compute at once, or as many as there can be.

    If the request leaves the number of micro-batches open, it is doubled until there are as many rounds as boxes.
    """
    training, num_boxes = request.training, len(request.boxes)
    num_ranks = 1 if request.chooses_ranks else request.num_ranks
    number = training.num_microbatches
    while request.chooses_microbatches and number < num_boxes * num_ranks and 2 * number <= training.batch_size:
        number *= 2
    of_rank = -(-number // num_ranks)
    sizes = (size for size in range(of_rank // num_boxes, 0, -1) if of_rank % size == 0)
    return Rounds(num_ranks=num_ranks, num_microbatches=number, group_size=next(sizes, 1))
