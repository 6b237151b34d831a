"""The predictions of finished jobs are stored once a job, by the source of their times."""

import json
from dataclasses import replace
from pathlib import Path

from windlass.planner.predictions import PastPrediction, PastPredictions
from windlass.planner.predictions.confidence import TimesFrom

ONE = PastPrediction(job_id="ftjob-1", times_from="blocks", predicted_s=2.0, measured_s=2.5, num_steps=20)


def test_errors_are_those_of_the_same_source(tmp_path: Path) -> None:
    past = PastPredictions(folder=tmp_path / "new")
    assert past.errors(TimesFrom.BLOCKS) == []
    past.add(ONE)
    past.add(replace(ONE, job_id="ftjob-2", measured_s=2.0))
    past.add(replace(ONE, job_id="ftjob-3", times_from="rates"))
    assert past.errors(TimesFrom.BLOCKS) == [1.25, 1.0]
    past.add(replace(ONE, measured_s=3.0))
    assert past.errors(TimesFrom.BLOCKS) == [1.0, 1.5]


def test_only_the_last_predictions_are_kept_and_broken_lines_are_left_out(tmp_path: Path) -> None:
    past = PastPredictions(folder=tmp_path)
    for number in range(60):
        past.add(replace(ONE, job_id=f"ftjob-{number}", measured_s=2.0 + number))
    assert past.errors(TimesFrom.BLOCKS)[-1] == 30.5
    assert len(past.errors(TimesFrom.BLOCKS)) == 50
    (path,) = tmp_path.iterdir()
    path.write_text('{"job_id": "x"}\n[1]\nnot json\n' + path.read_text() + '{"predicted_s": 1')
    assert len(past.errors(TimesFrom.BLOCKS)) == 50


def test_predictions_of_another_version_say_nothing_of_new_ones(tmp_path: Path) -> None:
    past = PastPredictions(folder=tmp_path)
    past.add(ONE)
    (path,) = tmp_path.iterdir()
    values = json.loads(path.read_text())
    older = {key: value for key, value in values.items() if key != "version"}
    path.write_text(f"{json.dumps(older)}\n{json.dumps(values | {'version': values['version'] + 1})}\n")
    assert past.errors(TimesFrom.BLOCKS) == []
    past.add(replace(ONE, job_id="ftjob-2", measured_s=3.0))
    assert past.errors(TimesFrom.BLOCKS) == [1.5]
    assert len(path.read_text().splitlines()) == 3
