"""The faults that a seed selects, and the rules for a job's record.

`tests/e2e/test_chaos.py` runs the benchmark itself.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.boxes.benchmark import followed_by
from benchmarks.chaos.jobs import Moment, Observer
from benchmarks.chaos.plan import (
    KINDS_OF_BOXES,
    KINDS_OF_SPREAD,
    ONLY_OF_BOXES,
    DatabaseKind,
    Injury,
    Kind,
    Run,
    plan_runs,
    plan_runs_of_boxes,
)
from benchmarks.chaos.record import Complaint, Record, Wrong, complaints, read_record
from benchmarks.chaos.results import Done, Result, Results, count_wrongs
from tests.support.service.dispatcher_stage import Stage
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job, JobEvent
from windlass.storage.sql.repositories.events import EventRepository

BOTH = list(DatabaseKind)


def test_a_seed_means_the_same_injuries_each_time() -> None:
    runs = plan_runs(40, 1, BOTH, num_steps=80, disk_can_be_filled=True)
    assert runs == plan_runs(40, 1, BOTH, num_steps=80, disk_can_be_filled=True)
    assert runs != plan_runs(40, 2, BOTH, num_steps=80, disk_can_be_filled=True)
    assert [run.number for run in runs] == list(range(1, 41))
    assert [run.database for run in runs[:4]] == BOTH * 2


def test_every_kind_of_injury_comes_and_each_as_often_as_another() -> None:
    for database in BOTH:
        runs = plan_runs(40, 1, [database], num_steps=80, disk_can_be_filled=True)
        times = Counter(injury.kind for run in runs for injury in run.injuries)
        possible = (
            set(Kind) - set(ONLY_OF_BOXES) - ({Kind.DATABASE_RESTARTED} if database is DatabaseKind.SQLITE else set())
        )
        assert set(times) == possible
        assert max(times.values()) - min(times.values()) <= 1


def test_forty_runs_bring_each_kind_three_times_to_each_database() -> None:
    times = Counter(
        (run.database, injury.kind)
        for run in plan_runs(40, 1, BOTH, num_steps=80, disk_can_be_filled=True)
        for injury in run.injuries
    )
    assert len(times) == 2 * (len(Kind) - len(ONLY_OF_BOXES)) - 1
    assert min(times.values()) >= 3


def test_a_longer_plan_begins_as_a_shorter_one() -> None:
    short, longer = (plan_runs(num, 1, BOTH, num_steps=80, disk_can_be_filled=True) for num in (10, 40))
    assert longer[:10] == short


def test_a_disk_that_cannot_be_filled_is_not() -> None:
    runs = plan_runs(40, 1, BOTH, num_steps=80, disk_can_be_filled=False)
    assert Kind.FULL_DISK not in {injury.kind for run in runs for injury in run.injuries}


def test_all_injuries_come_while_the_job_is_under_way() -> None:
    for run in plan_runs(40, 1, BOTH, num_steps=80, disk_can_be_filled=True):
        assert 1 <= len(run.injuries) <= 3
        assert all(injury.after >= 0 for injury in run.injuries)
        assert sum(injury.after for injury in run.injuries) <= 1
        assert all(1 <= injury.by_step <= 80 for injury in run.injuries)


def test_injuries_of_boxes_hit_each_box_and_only_those_that_they_may_hit() -> None:
    boxes = ["head", "box1", "box2"]
    runs = plan_runs_of_boxes(15, 1, boxes, num_steps=80)
    assert runs == plan_runs_of_boxes(15, 1, boxes, num_steps=80)
    assert runs[:5] == plan_runs_of_boxes(5, 1, boxes, num_steps=80)
    injuries = [injury for run in runs for injury in run.injuries]
    assert len(injuries) >= 60
    times = Counter(injury.kind for injury in injuries)
    assert set(times) == set(KINDS_OF_BOXES)
    assert max(times.values()) - min(times.values()) <= 1
    for kind, may_hit_head in KINDS_OF_BOXES.items():
        hit = {injury.box for injury in injuries if injury.kind is kind}
        assert hit == ({"head"} if kind is Kind.HEAD else set(boxes) if may_hit_head else {"box1", "box2"})
    for injury in injuries:
        if injury.kind in (Kind.CUT, Kind.SLOW):
            assert 1.0 <= injury.lasts_s <= 20.0


def test_injuries_of_a_job_over_boxes_hit_each_box_and_last_as_long_as_they_should() -> None:
    boxes = ["head", "box1", "box2"]

    def plan(num_runs: int, *, fills_disks: bool = True) -> list[Run]:
        return plan_runs_of_boxes(num_runs, 1, boxes, num_steps=40, is_spread=True, disk_can_be_filled=fills_disks)

    runs = plan(15)
    assert runs[:5] == plan(5)
    injuries = [injury for run in runs for injury in run.injuries]
    assert len(injuries) >= 60
    assert set(KINDS_OF_SPREAD) == {injury.kind for injury in injuries}
    assert Kind.FULL_DISK not in {injury.kind for run in plan(15, fills_disks=False) for injury in run.injuries}
    for kind in (Kind.HEAD, Kind.SERVICE, Kind.PAUSED):
        assert {injury.box for injury in injuries if injury.kind is kind} == {"head"}
    cuts = Counter(each.lasts_s for each in injuries if each.kind in (Kind.CUT, Kind.APART, Kind.STOPPED))
    assert set(cuts) == {3.0, 10.0, 60.0}
    assert max(cuts.values()) - min(cuts.values()) <= 1


def test_what_followed_an_injury_is_its_attempts_and_the_second_new_step() -> None:
    observer = Observer("http://127.0.0.1:1", "job")
    observer.began_s, observer.took_s = 100.0, 60.0
    told = [(10, 0, 1), (20, 3, 1), (21, 4, 1), (30, 4, 2), (35, 5, 2), (40, 6, 2), (45, 6, 3), (55, 7, 3)]
    observer.moments = [Moment(at_s=100.0 + at_s, step=step, attempt=attempt) for at_s, step, attempt in told]
    kill = Injury(kind=Kind.RUNNER, after=0.0, by_step=1, lasts_s=0.0, box="head")
    done = [Done(injury=kill, at_s=at_s) for at_s in (42.0, 20.5, 25.0)]
    followed = [
        (each.at_s, each.step, each.num_attempts, each.progress_s) for each in followed_by(done, observer, 100.0)
    ]
    assert followed == [(20.5, 3, 0, 14.5), (25.0, 4, 1, 15.0), (42.0, 6, 1, 18.0)]


def test_what_is_wrong_is_counted_once_for_each_job() -> None:
    twice = [Complaint(wrong=Wrong.DOUBLED, text=f"step {step} was reported 2 times") for step in (3, 4)]
    other = Complaint(wrong=Wrong.DOUBLED, text="job 2 ran on box1, box2", job=2)
    lost = Complaint(wrong=Wrong.LOST, text="step 7 was not reported")
    stray = Complaint(wrong=Wrong.OTHER, text="a file is left")
    results = [dataclasses.replace(_result(1), complaints=(*twice, other, stray)), _result(2)]
    results.append(dataclasses.replace(_result(3), complaints=(twice[0], lost)))
    assert count_wrongs(results) == {"wrong_ends": 0, "loss_mismatches": 0, "lost": 1, "doubled": 3, "hangs": 0}


def _result(number: int, *complaints: str) -> Result:
    injury = Injury(kind=Kind.FULL_DISK, after=1 / 7, lasts_s=2.5, by_step=7)
    return Result(
        run=Run(number=number, database=DatabaseKind.POSTGRESQL, injuries=(injury,)),
        done=(Done(injury=injury, at_s=1 / 3),),
        took_s=20.5,
        lost_s=0.5,
        num_attempts=2,
        load=1.5,
        complaints=tuple(Complaint(wrong=Wrong.DOUBLED, text=text) for text in complaints),
    )


def test_results_are_kept_and_what_did_not_end_right_is_to_be_made_again(tmp_path: Path) -> None:
    path, first, wrong, again = (
        tmp_path / "results.jsonl",
        _result(1),
        _result(2, "step 3 was reported 2 times"),
        _result(2),
    )
    results = Results(path)
    results.begin({"seed": 1}, {DatabaseKind.SQLITE: 25.06})
    results.add(first)
    results.add(wrong)
    results = Results(path)
    assert results.all == [first, wrong]
    assert results.right == {1}
    results.begin({"seed": 1}, {DatabaseKind.SQLITE: 25.06})
    results.add(again)
    assert Results(path).all == [first, wrong, again]
    assert Results(path).right == {1, 2}
    told = Results(path).said
    assert told[0] == told[3] == "Undisturbed: 25.1 s on sqlite."
    assert told[2] == (
        "Run 2, postgresql: full disk for 2 s at 0.3 s: NOT RIGHT: step 3 was reported 2 times (load 1.5)."
    )
    assert told[4] == "Run 2, postgresql: full disk for 2 s at 0.3 s: right after 20.5 s, 2 attempts (load 1.5)."
    with pytest.raises(ValueError, match="has the results of other runs"):
        Results(path).begin({"seed": 2}, {})


def test_results_need_no_file() -> None:
    results = Results(None)
    results.begin({"seed": 1}, {DatabaseKind.SQLITE: 25.06})
    results.add(_result(1))
    assert len(results.all) == 1


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    migrate(url)
    database = Database(url)
    yield database
    database.close()


@pytest.fixture
def stage(tmp_path: Path, database: Database) -> Stage:
    return Stage(tmp_path / "home", database)


@pytest.fixture
def job_id(stage: Stage) -> str:
    job_id, journal = stage.run()
    for step in (1, 2):
        journal.append("metrics", f"Step {step}", step=step, total_steps=2, train_loss=1.0 / step)
    stage.export_model()
    folder = Path(stage.runners.started[-1].output_dir)
    (folder / "model.safetensors").write_bytes(b"weights")
    journal.append_outcome("succeeded", "The model is ready", trained_tokens=10)
    journal.close()
    stage.end_runner(job_id)
    stage.tick()
    return job_id


@pytest.fixture
def record(stage: Stage, job_id: str) -> Record:
    return read_record(stage.database, stage.settings, job_id)


def test_job_that_ended_right_has_no_faults(record: Record, job_id: str) -> None:
    assert complaints(record, record) == []
    assert record.train_losses == ((1, 1.0), (2, 0.5))
    ((name, _),) = record.models
    assert name == "ft:tiny::JOB/model.safetensors"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train_losses": ((1, 1.0),)}, "train_losses are not those of the undisturbed job: 1 instead of 2"),
        ({"train_losses": ((1, 1.0),)}, "step 2 was not reported"),
        ({"num_begins": 2}, "the job began 2 times"),
        ({"train_losses": ((1, 1.0), (2, 0.5), (2, 0.5))}, "step 2 was reported 2 times"),
        ({"train_losses": ((2, 0.5), (1, 1.0))}, "the steps were not reported in their order"),
        ({"train_losses": ((1, 1.0), (2, 0.5000001))}, "train_losses are not those of the undisturbed job: (2, 0.5"),
        ({"result_file": "step\n"}, "result_file are not those"),
        ({"models": (("ft:tiny::JOB/model.safetensors", "0"),)}, "models are not those"),
        ({"checkpoints": ("ft:tiny::JOB-step-1",)}, "checkpoints are not those"),
        ({"faults": ("events have the same ids",)}, "events have the same ids"),
    ],
)
def test_every_difference_is_reported(record: Record, change: dict[str, object], complaint: str) -> None:
    found = list(map(str, complaints(dataclasses.replace(record, **change), record)))  # type: ignore[arg-type]
    assert any(each.startswith(complaint) for each in found), found


def test_jobs_that_made_the_same_have_the_same_digest_whatever_happened_to_them(record: Record) -> None:
    assert dataclasses.replace(record, faults=("something",), job=Job()).digest == record.digest
    assert dataclasses.replace(record, train_losses=((1, 1.0), (2, 0.5000001))).digest != record.digest


def test_a_job_that_did_not_succeed_is_complained_of(record: Record) -> None:
    job = Job(status=JobStatus.FAILED, error={"code": "runner_lost"})
    (complaint,) = complaints(dataclasses.replace(record, job=job), record, job=2)
    assert complaint == Complaint(wrong=Wrong.END, text='the job is failed: {"code": "runner_lost"}', job=2)


def test_record_without_event_and_file_without_owner_are_faults(stage: Stage, job_id: str, database: Database) -> None:
    journal = stage.journal(job_id, 1)
    journal.append("message", "nobody took this in")
    journal.close()
    (stage.settings.files_dir / "file-stray").write_text("")
    faults = read_record(database, stage.settings, job_id).faults
    assert faults[0].startswith("of the journal's records [(1, 4)] are no events, [] are several")
    assert faults[1] == "the file file-stray has no owner in the database"
    with database.write() as session:
        EventRepository(session).add(job_id, attempt=1, message="of the service's own")
    assert len(read_record(database, stage.settings, job_id).faults) == 2


def test_job_of_another_box_needs_no_journal(stage: Stage, job_id: str, record: Record) -> None:
    (stage.settings.jobs_dir / job_id / "journal.jsonl").unlink()
    assert read_record(stage.database, stage.settings, job_id).faults == ()
    with stage.database.write() as session:
        late = JobEvent(job_id=job_id, attempt=0, seq=1, created_at=1.0, level="info", message="late")
        late.type, late.data = "message", {}
        session.add(late)
    assert read_record(stage.database, stage.settings, job_id).faults == (
        "the events are not in the order of the journal",
    )
    assert record.faults == ()
