"""The short forms of `python -m benchmarks.chaos`: three faults during one job, or during the jobs of two boxes."""

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


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_jobs_of_two_boxes_end_right_whatever_dies(tmp_path: Path) -> None:
    try:
        stage = BoxStage(tmp_path, 2)
    except NamespaceError as error:
        pytest.skip(f"no boxes of namespaces on this machine: {error}")
    runs = Runs(stage, 2)
    try:
        stage.start()
        undisturbed = runs.run_undisturbed()
        result = runs.do_run(Run(number=1, database=DatabaseKind.SQLITE, injuries=INJURIES_OF_BOXES), undisturbed)
        assert result.complaints == ()
        assert [each.injury for each in result.done] == list(INJURIES_OF_BOXES)
        assert stage.end() == []
    finally:
        runs.close()
        stage.close()
