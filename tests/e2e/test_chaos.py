"""The short forms of `python -m benchmarks.chaos`: three faults during one job, or during jobs of or over two boxes."""

from pathlib import Path

import pytest

from benchmarks.chaos.benchmark import Stages, do_run, run_undisturbed
from benchmarks.chaos.boxes.benchmark import Runs
from benchmarks.chaos.boxes.stage import BoxStage, names_of
from benchmarks.chaos.plan import DatabaseKind, Injury, Kind, Run
from tests.support.boxes.namespaces import NamespaceError

INJURIES = (
    Injury(kind=Kind.DISPATCHER, after=0.1, lasts_s=0.0, by_step=80),  # while the job is prepared
    Injury(kind=Kind.SSD_1, after=0.0, lasts_s=0.0, by_step=80),
    Injury(kind=Kind.EVERYTHING, after=0.3, lasts_s=1.0, by_step=60),
)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_job_ends_right_whatever_dies(tmp_path: Path) -> None:
    stages = Stages(tmp_path, None, fills_disks=False)
    try:
        stage = stages.of(DatabaseKind.SQLITE)
        undisturbed = run_undisturbed(stage)
        result = do_run(stage, Run(number=1, database=DatabaseKind.SQLITE, injuries=INJURIES), undisturbed)
        assert result.complaints == ()
        assert [each.injury for each in result.done] == list(INJURIES)
        assert stages.end() == []
    finally:
        stages.close()


_HEAD, _BOX = names_of(2)
INJURIES_OF_BOXES = (
    Injury(kind=Kind.CUT, after=0.1, lasts_s=5.0, by_step=80, box=_BOX),  # while a job is given to the box
    Injury(kind=Kind.AGENT, after=0.2, lasts_s=0.0, by_step=80, box=_BOX),
    Injury(kind=Kind.HEAD, after=0.3, lasts_s=1.0, by_step=60, box=_HEAD),
)


INJURIES_OF_SPREAD = (
    Injury(kind=Kind.SSD_0, after=0.1, lasts_s=0.0, by_step=2, box=_BOX),
    Injury(kind=Kind.PAUSED, after=0.5, lasts_s=1.0, by_step=10, box=_HEAD),
    Injury(kind=Kind.APART, after=0.5, lasts_s=5.0, by_step=16, box=_HEAD),
)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("is_spread", [False, True], ids=["jobs of two boxes", "a job over two boxes"])
def test_jobs_of_two_boxes_end_right_whatever_dies(tmp_path: Path, is_spread: bool) -> None:
    injuries = INJURIES_OF_SPREAD if is_spread else INJURIES_OF_BOXES
    try:
        stage = BoxStage(tmp_path, 2, is_spread=is_spread)
    except NamespaceError as error:
        pytest.skip(f"no boxes of namespaces on this machine: {error}")
    runs = Runs(stage, 1 if is_spread else 2)
    try:
        stage.start()
        undisturbed = runs.run_undisturbed()
        result = runs.do_run(Run(number=1, database=DatabaseKind.SQLITE, injuries=injuries), undisturbed)
        assert result.complaints == ()
        assert [each.injury for each in result.done] == list(injuries)
        assert stage.end() == []
    finally:
        runs.close()
        stage.close()
