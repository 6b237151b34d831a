"""The short form of `python -m benchmarks.chaos`: three faults during one job."""

from pathlib import Path

import pytest

from benchmarks.chaos.benchmark import Stages, do_run, run_undisturbed
from benchmarks.chaos.plan import DatabaseKind, Injury, Kind, Run

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
