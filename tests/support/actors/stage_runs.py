"""Jobs in one process that stands for several boxes."""

import dataclasses
from pathlib import Path
from typing import Any

from tests.support.actors.whole_jobs import Run, grouped, job
from tests.support.training import boxes_of, has_direct_io, leftovers_of, make_partition
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Message, OfferParams
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.memory_plan.plan import Placement

# Each way to divide the model's five blocks: the embedding, three layers and the head.
STAGES = {
    "1-4": (Stage(0, 1), Stage(1, 5)),
    "2-3": (Stage(0, 2), Stage(2, 5)),
    "4-1": (Stage(0, 4), Stage(4, 5)),
    "2-1-2": (Stage(0, 2), Stage(2, 3), Stage(3, 5)),
    "1-3-1": (Stage(0, 1), Stage(1, 4), Stage(4, 5)),
}
PLACES = {
    "SSDs": Placement(num_cached_params=0),
    "some params stay": Placement(num_cached_params=3),
    "gradients on SSDs": Placement(num_host_grad_blocks=1),
    "host memory": Placement(host_blocks=(0, 1, 2, 3, 4), commit_every=3),
    "mixed": Placement(host_blocks=(1,), device_blocks=(0, 3), num_cached_params=2, commit_every=4),
}


def run_attempt(first: JobSpec, *others: JobSpec, **options: Any) -> dict[str, Any]:
    direct, partition = has_direct_io(Path(first.model_dir)), make_partition(first)
    return run_local(first, other_boxes=others, partition=partition, poison_released=True, direct=direct, **options)


def train(spec: JobSpec, stages: tuple[Stage, ...], ranks: tuple[int, ...] = (), **options: Any) -> None:
    first, *others = boxes_of(spec, stages, ranks)
    outcome = run_attempt(first, *others, **options)
    assert outcome["status"] == "succeeded", outcome
    assert [leftovers_of(each) for each in (first, *others)] == [[]] * len(stages)
    assert [half_exported(each) for each in (first, *others)] == [[]] * len(stages)
    assert [each.box for each in others if list(Path(each.output_dir).parent.glob("out*"))] == []


def half_exported(spec: JobSpec) -> list[Path]:
    """Folders of exports of a box that are not complete."""
    return [path for path in Path(spec.output_dir).parent.iterdir() if path.name.startswith(".")]


def run(
    root: Path,
    stages: tuple[Stage, ...] = (Stage(0, 5),),
    group_size: int | None = None,
    num_ranks: int | tuple[int, ...] = 1,
    **changes: Any,
) -> Run:
    """`num_ranks`: the GPU workers of all boxes, or of each."""
    spec = grouped(job(root, **({"lanes": 1} | changes)), group_size)
    if isinstance(num_ranks, int):
        train(spec := dataclasses.replace(spec, num_ranks=num_ranks), stages)
    else:
        train(spec, stages, num_ranks)
    return Run.of(spec)


def is_export(message: Message) -> bool:
    """Returns whether a message is about params on their way to the first box."""
    return isinstance(message, OfferParams) or bool((it := getattr(message, "crossing", None)) and it.is_export)
