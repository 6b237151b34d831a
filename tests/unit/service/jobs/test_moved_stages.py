"""A job that the service moves from one box to two and back: its divisions and specifications, with the real engine."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.local_move import move_locally
from tests.support.actors.whole_jobs import Run
from tests.support.cut_off import CutOff
from tests.support.service.prepared_jobs import RESULTS, job_of, windlass_settings
from tests.support.training import has_direct_io, keep_calibration, leftovers_of, make_spec
from tests.unit.service.jobs.test_stage_plans import cpu_machine, filled_home, run_with
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Message, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.actors.runtime.moving.division import MoveSpec
from windlass.engine.model.partition import partition_folder
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.stages.job_stages import plan_stages
from windlass.planner.stages.stages_plan import StagesPlan
from windlass.service.installation.settings import Settings
from windlass.service.jobs.box_plans import BoxKind
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.plan_files import load_plan
from windlass.service.jobs.spec_builder import build_job_spec, resolve_job
from windlass.service.jobs.stage_plans import (
    build_move_spec,
    build_stage_spec,
    division_of,
    fields_on_one_box,
    keep_stages,
    layout_epoch_on_one_box,
    stages_request,
)
from windlass.service.preparation.steps import PREPARE_DATA
from windlass.storage.ids import ActorName, Attempt, Kernel
from windlass.storage.sql.models import Job

RESOURCES = MachineResources(num_cores=2, num_gpus=0)
NAMES = ("head", "attic")


class MovingJob:
    """A job of the head's home, with the homes of two boxes. Its attempts run in this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made = make_spec(root / "made", num_microbatches=2, total_steps=6, clip_norm=0.5, evaluate_every=6)
        self.job = self._new_job()
        self.homes = [filled_home(root / name, self.made, self.job, 1) for name in NAMES]
        self.layout = partition_folder(self.made.model_dir, self.made.training.precision).layout

    def _new_job(self) -> Job:
        job = job_of(windlass_settings(precision="fp32", sequence_length=48, num_microbatches=2, box="head"))
        job.id = f"ftjob-{self.made.job.removeprefix('ftjob-')}"
        results = {**RESULTS, PREPARE_DATA: {**RESULTS[PREPARE_DATA], "num_examples": 18}}
        training = replace(self.made.training, kernel=Kernel.FUSED)
        resolved = replace(resolve_job(job, results), training=training)
        job.hyperparameters, job.total_steps = json.loads(json.dumps(resolved.hyperparameters)), training.total_steps
        job.windlass, job.plan_number, job.attempt = {**job.windlass, "evaluate_every": 6}, 0, 0
        return job

    @property
    def head(self) -> Settings:
        return self.homes[0]

    @property
    def division(self) -> StagesPlan:
        division = division_of(self.head, self.job)
        assert division is not None
        return division

    def here(self, spec: JobSpec) -> JobSpec:
        """Lets a specification use memory of the test."""
        arena_dir = self.root / f"shm{spec.box}"
        arena_dir.mkdir(exist_ok=True)
        for ssd_dir in map(Path, spec.ssd_dirs):
            keep_calibration(ssd_dir)
        return replace(spec, arena_dir=str(arena_dir), host_memory_nbytes=spec.host_memory_nbytes or 2**28)

    def on_one_box(self, settings: Settings | None = None) -> JobSpec:
        """The next attempt's specification, if the job is on one box."""
        home = self.head if settings is None else settings
        epoch = layout_epoch_on_one_box(home, self.job.id)
        plan = load_plan(home, self.job)
        return self.here(build_job_spec(home, RESOURCES, self.job, plan, layout_epoch=epoch))

    def over_boxes(self, plan: StagesPlan) -> list[JobSpec]:
        """The next attempt's specifications, if the job is over all boxes."""
        return [
            self.here(build_stage_spec(home, RESOURCES, self.job, plan, index)) for index, home in enumerate(self.homes)
        ]

    def cut_off(self, specs: Sequence[JobSpec], step: int) -> None:
        """Trains until a step is half done."""

        def look(to: ActorName, message: Message) -> None:
            if isinstance(message, UpdateStep) and message.step == step:
                raise CutOff

        with pytest.raises(CutOff):
            self.train(*specs, on_message=look)

    def train(self, first: JobSpec, *others: JobSpec, **options: Any) -> None:
        """Trains to the end."""
        direct = has_direct_io(self.root)
        outcome = run_local(first, other_boxes=others, poison_released=True, direct=direct, **options)
        assert outcome["status"] == "succeeded", outcome

    def planned(self, num_boxes: int, hardware: Hardware | None) -> StagesPlan:
        """The next division, as the head plans it."""
        kinds = [(name, BoxKind.of_home(self.head, RESOURCES, hardware), None) for name in NAMES[:num_boxes]]
        request = stages_request(self.head, self.job, kinds, num_boxes, (), self.division)
        return replace(plan_stages(request), layout_epoch=self.division.layout_epoch + 1)

    def move(self, after: StagesPlan) -> None:
        """Moves the states, and puts the division into force."""
        plans = self.division, after
        moves = [
            build_move_spec(home, RESOURCES, self.job, plans, NAMES, index) for index, home in enumerate(self.homes)
        ]
        moved = move_locally([self._move_here(move) for move in moves], self.layout, direct=has_direct_io(self.root))
        assert sum(each.nbytes for each in moved.blocks) > 0
        keep_stages(self.head, self.job.id, after)

    def _move_here(self, move: MoveSpec) -> MoveSpec:
        old, new = (None if spec is None else self.here(spec) for spec in (move.old, move.new))
        return replace(move, old=old, new=new)


@pytest.mark.long
def test_job_on_one_then_two_and_one_boxes_has_the_bits_of_one_that_stayed(tmp_path: Path) -> None:
    moving = MovingJob(tmp_path)
    job = moving.job

    def next_attempt(**changes: Any) -> None:
        job.attempt = Attempt(job.attempt + 1)
        for name, value in changes.items():
            setattr(job, name, value)

    next_attempt()
    first = moving.on_one_box()
    assert (first.layout_epoch, first.stages) == (0, ())
    moving.cut_off([first], 3)
    next_attempt(windlass={**job.windlass, "boxes": 2, "box": None})
    two = moving.planned(2, None)
    moving.move(two)
    next_attempt()
    moving.cut_off(moving.over_boxes(two), 5)
    next_attempt(windlass={**job.windlass, "boxes": 1})
    one = moving.planned(1, cpu_machine())
    assert one.boxes == ("head",)
    moving.move(one)
    next_attempt(**fields_on_one_box(moving.head, job, one))
    last = moving.on_one_box()
    assert (last.layout_epoch, last.stages, last.host_memory_nbytes) == (2, (), one.stages[0].arena_nbytes)
    assert (job.windlass["boxes"], job.plan_number) == (None, 1)
    moving.train(last)
    assert leftovers_of(last) == []

    alone = filled_home(tmp_path / "alone", moving.made, job, 1)
    job.attempt, job.plan_number = Attempt(1), 0
    Run.of(last).assert_equals(run_with([replace(moving.on_one_box(alone), arena_dir=str(tmp_path / "shm"))]))
