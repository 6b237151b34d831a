"""A job over several boxes: a head and a box with real dispatchers and an agent, and stand-in runners."""

import pytest

from tests.support.service.cluster_stage import NAME
from tests.support.service.spread_stage import PLAN, Spread
from windlass.actors.job.errors import append_error
from windlass.service.cluster.box.parts import discard_parts
from windlass.service.machine.fleet.content import taken_dir
from windlass.storage.ids import Attempt
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import JobPart
from windlass.storage.sql.repositories.boxes import Instruction, MirrorRepository, PartRepository


def test_job_is_planned_over_its_boxes_and_each_gets_its_part(spread: Spread) -> None:
    job_id = spread.prepare(boxes=2)
    spread.head.tick()
    [planner] = spread.head.stage_planners
    assert [box.name for box in planner.request.boxes] == ["head", NAME]
    assert spread.head.job(job_id).waiting_reason == f"its plan over the boxes head, {NAME} is being made"
    planner.answer = PLAN
    spread.head.tick()
    assert spread.state(job_id) == "copying"
    assert spread.head.job(job_id).hyperparameters["num_microbatches"] == 2
    events = spread.head.messages(job_id)
    assert f"Divided over 2 boxes: box head: blocks 0 to 1; box {NAME}: blocks 2 to 3" in events
    assert spread.head.status(job_id) is JobStatus.QUEUED, "it waits until all boxes have its files"
    spread.go_on(lambda: spread.state(job_id) == "ready")
    folder = spread.box.settings.jobs_dir / job_id
    assert (folder / "prepare" / "stages.json").exists()
    assert (folder / "dataset" / "tokens.bin").stat().st_size == 256 * 5000


def test_simulated_step_of_a_division_is_kept_beside_it(spread: Spread) -> None:
    job_id = spread.prepare(boxes=2)
    spread.head.tick()
    folder = spread.head.settings.jobs_dir / job_id / "prepare"
    (folder / "stages.partial" / "simulated").mkdir(parents=True)
    (folder / "stages.partial" / "simulated" / "step-4.json").write_text("{}")
    spread.head.stage_planners[-1].answer = PLAN
    spread.head.tick()
    assert spread.state(job_id) == "copying"
    assert (folder / "simulated" / "step-4.json").exists()
    assert not (folder / "stages.partial").exists()


def test_attempt_that_a_box_never_heard_of_is_not_begun_later(spread: Spread) -> None:
    job_id = spread.divide()
    spread.go_on(lambda: spread.head.runners.alive)
    spread.head.end_runner(job_id, 1)
    spread.head.tick()
    spread.go_on(lambda: spread.head.job(job_id).attempt == 2)
    spread.go_on(lambda: spread.box.runners.alive)
    assert [spec.attempt for spec in spread.box.runners.started] == [2]


def test_all_boxes_serve_an_attempt_and_reach_each_other(spread: Spread) -> None:
    job_id = spread.run()
    [head], [box] = spread.head.runners.links, spread.box.runners.links
    assert head.names == box.names
    first, second = head.names
    assert head.secret == box.secret
    assert len(head.secret) == 32
    assert (box.addresses, head.addresses) == ({first: head.address}, {second: box.address})
    assert [(spec.job, spec.attempt, spec.box) for spec in spread.head.runners.started] == [(job_id, 1, 0)]
    assert [(spec.job, spec.attempt, spec.box) for spec in spread.box.runners.started] == [(job_id, 1, 1)]
    assert spread.box.runners.started[0].job_dir == str(spread.box.settings.jobs_dir / job_id)
    spread.go_on(lambda: spread.state(job_id) == "running")


def test_ended_job_leaves_nothing_on_any_box(spread: Spread) -> None:
    job_id = spread.run()
    spread.head.export_model()
    spread.end_attempt(job_id, "succeeded", trained_tokens=7)
    spread.go_on(lambda: spread.part(job_id) is None)
    assert spread.head.status(job_id) is JobStatus.SUCCEEDED
    assert spread.part(job_id, spread.box) is None
    assert not (spread.box.settings.jobs_dir / job_id).exists()
    assert list(taken_dir(spread.box.settings.home).glob("*.json")) == []
    assert spread.box.dispatcher._parts.hold is None


def test_lost_attempt_is_followed_by_another_once_all_boxes_have_ended_theirs(spread: Spread) -> None:
    job_id = spread.run()
    spread.begin(job_id)
    spread.go_on(lambda: spread.state(job_id) == "running")
    spread.head.end_runner(job_id, 1)  # without an outcome
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    spread.head.now += 300
    spread.head.tick()
    assert spread.head.job(job_id).attempt == 1
    assert spread.head.job(job_id).waiting_reason == f"the processes of attempt 1 have not ended yet on box {NAME}"
    spread.box.end_runner(job_id, 1)
    spread.go_on(lambda: len(spread.box.runners.started) == 2)
    assert spread.box.runners.started[-1].attempt == spread.head.runners.started[-1].attempt == 2
    first, second = spread.box.runners.links
    assert first.secret != second.secret


def test_part_that_outlives_its_attempt_is_killed(spread: Spread) -> None:
    job_id = spread.run()
    spread.begin(job_id)
    spread.head.end_runner(job_id, 1)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    spread.go_on(lambda: spread.part(job_id, spread.box).attempt != 1)  # type: ignore[union-attr]
    spread.box.tick()
    assert spread.box.runners.alive, "it may end by itself"
    spread.box.now += 200
    spread.box.tick()
    assert not spread.box.runners.alive


def test_part_that_cannot_start_says_why(spread: Spread) -> None:
    spread.box.runners.refusal = ValueError("the arena cannot be made")
    job_id = spread.divide()
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.RUNNING)
    spread.go_on(lambda: (spread.part(job_id) or JobPart()).told == "the arena cannot be made")
    assert spread.head.messages(job_id).count(f"Box {NAME}: the arena cannot be made") == 1
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    assert not spread.head.runners.alive
    told = f"Attempt 1 was lost: box {NAME} could not begin its part of it: the arena cannot be made"
    assert any(message.startswith(told) for message in spread.head.messages(job_id))


@pytest.mark.long
def test_attempt_ends_at_once_when_a_part_ends_before_all_are_connected(spread: Spread) -> None:
    job_id = spread.run()
    append_error(spread.box.settings.jobs_dir / job_id, Attempt(1), "Traceback\nValueError: no such SSD")
    spread.box.end_runner(job_id, 1)
    spread.go_on(lambda: spread.head.status(job_id) is JobStatus.QUEUED)
    told = f"Attempt 1 was lost: box {NAME} could not begin its part of it: ValueError: no such SSD"
    assert any(message.startswith(told) for message in spread.head.messages(job_id))


def test_part_whose_attempt_never_began_is_killed_at_once(spread: Spread) -> None:
    job_id = spread.run()
    spread.head.end_runner(job_id, 1)
    spread.until(lambda: spread.head.tick() or not spread.box.runners.alive, most=5)


def test_part_that_ends_after_all_were_connected_leaves_the_end_to_the_runners(spread: Spread) -> None:
    job_id = spread.run()
    spread.begin(job_id)
    spread.box.end_runner(job_id, 1)
    spread.go_on(lambda: (spread.part(job_id) or JobPart()).served == 1 and spread.state(job_id) == "ready")
    spread.head.tick(2)
    assert spread.head.runners.alive


@pytest.mark.long
def test_job_cancelled_before_its_first_attempt_is_removed_from_its_boxes(spread: Spread) -> None:
    job_id = spread.divide()
    spread.go_on(lambda: spread.state(job_id) == "copying" and spread.part(job_id, spread.box) is not None)
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, job_id, here=spread.head.node)
    spread.go_on(lambda: spread.part(job_id) is None)
    assert spread.head.status(job_id) is JobStatus.CANCELLED
    assert not (spread.box.settings.jobs_dir / job_id).exists()


def test_agent_and_dispatchers_that_are_killed_go_on(spread: Spread) -> None:
    job_id = spread.divide()
    for _ in range(30):
        spread.agent.tick()
        for transfer in list(spread.agent._takings._transfers.values()):
            assert transfer.task is not None
            transfer.task.result(timeout=20)
            spread.agent.tick()
        spread.agent.close()
        spread.new_agent()
        spread.box.new_dispatcher().tick()
        spread.head.dispatcher._spread.close()  # the sockets of a killed process are closed
        spread.head.new_dispatcher().tick()
        spread.now += 1
        if spread.box.runners.alive:
            break
    assert spread.box.runners.alive == spread.head.runners.alive == {(job_id, 1)}


def test_job_that_is_cancelled_while_it_is_planned_does_not_keep_others_from_it(spread: Spread) -> None:
    first, second = spread.prepare(boxes=2), spread.prepare(boxes=2)
    spread.head.tick()
    with spread.head.database.write() as session:
        MirrorRepository(session).request(Instruction.CANCEL, first, here=spread.head.node)
    spread.head.tick()
    assert [planner.stopped for planner in spread.head.stage_planners] == [True, False]
    spread.head.stage_planners[-1].answer = PLAN
    spread.head.tick()
    assert spread.state(second) == "copying"


def test_part_that_is_to_be_removed_begins_no_attempt(spread: Spread) -> None:
    job_id = spread.divide()
    spread.go_on(lambda: spread.state(job_id) == "ready")
    with spread.box.database.write() as session:
        parts = PartRepository(session)
        parts.want(job_id, spread.box.node, attempt=1, link={}, is_over=True)
        assert not parts.begin(job_id, spread.box.node, 1)
    assert not spread.box.runners.alive


def test_box_that_leaves_keeps_nothing_of_its_parts(spread: Spread) -> None:
    job_id = spread.run()
    spread.head.end_runner(job_id, 1)
    spread.box.end_runner(job_id, 1)
    assert discard_parts(spread.box.database, spread.box.settings) == []
    assert spread.part(job_id, spread.box) is None
    assert list(spread.box.settings.home.rglob(f"{job_id}*")) == []
