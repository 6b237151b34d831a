"""Several boxes that work for one service, as their users see them. Each box is a set of namespaces of this machine."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.box_service import CLUSTER_PORT, DEADLINE_S, HEAD, BoxService, box_service
from tests.e2e.installation import write_examples

_OPTIONS = ("--batch-size", "1", "--sequence-length", "32", "--precision", "fp32", "--set", "seed=7")
# Steps of one example each: enough that a job still trains when the head has called its box away.
_NUM_STEPS = 400
_NUM_SHORT_STEPS, _SHORT_CUT_S = 40, 5.0
_JOB = ("--epochs", "1", *_OPTIONS)
_ENDLESS = ("--epochs", "1000", *_OPTIONS)
_CUT_S = 20.0  # longer than the head waits until it calls a box away


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[BoxService]:
    """A head and two boxes, on which nothing runs yet."""
    with box_service(tmp_path, "left", "right") as boxes:
        yield boxes


@pytest.fixture
def joined(boxes: BoxService) -> BoxService:
    """The same, after both boxes have joined."""
    boxes.start_head()
    boxes.join("left", "right")
    return boxes


@pytest.fixture
def training_file(tmp_path: Path) -> Path:
    # In the folder of the head, as its commands read the file there.
    path = tmp_path / HEAD / "train.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_examples(path, _NUM_STEPS)
    return path


def test_a_head_that_does_not_answer_is_named(boxes: BoxService) -> None:
    code = f"wj_{'A' * 86}"
    line = boxes["left"].refused(*boxes.join_arguments("left", code))
    assert f"{boxes.network[HEAD].address}:{CLUSTER_PORT}" in line


# Without `long`, tests/integration/test_boxes.py has a joined box, with stand-ins for Ray's runners.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_box_joins_and_trains_while_its_link_is_cut_for_a_moment(tmp_path: Path) -> None:
    with box_service(tmp_path, "left") as boxes:
        file = tmp_path / HEAD / "short.jsonl"
        write_examples(file, _NUM_SHORT_STEPS)
        boxes.start_head()
        boxes.join("left")
        job_id = boxes.submit(file, *_JOB, box="left")
        boxes.await_step(job_id, 1)
        boxes.network["left"].cut()
        time.sleep(_SHORT_CUT_S)
        boxes.network["left"].restore()
        job = boxes.await_success(job_id)
        assert (job["windlass"]["attempt"], job["windlass"]["box"]) == (1, HEAD)
        assert len(boxes.losses(job_id)) == _NUM_SHORT_STEPS


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_jobs_train_on_all_boxes_at_once_and_their_models_are_on_the_head(
    joined: BoxService, training_file: Path
) -> None:
    listed = joined.boxes()
    assert {name: box["state"] for name, box in listed.items()} == dict.fromkeys((HEAD, "left", "right"), "ready")
    assert [box["is_head"] for box in listed.values()].count(True) == 1
    # Only the head listens to the network, and only on its cluster port.
    assert {port for _, port in joined.head.outer_listeners()} == {CLUSTER_PORT}
    for name in joined.others:
        assert joined[name].outer_listeners() == set()

    jobs = {name: joined.submit(training_file, *_JOB, box=name) for name in (HEAD, "left", "right")}
    deadline = time.monotonic() + DEADLINE_S
    while [len(box["jobs"]["running"]["data"]) for box in joined.boxes().values()] != [1, 1, 1]:
        assert time.monotonic() < deadline, f"never at the same time: {joined.boxes()}{joined.logs()}"
        time.sleep(0.2)
    ended = {name: joined.await_success(job_id) for name, job_id in jobs.items()}
    # The same request has the same result on every box.
    losses = {name: joined.losses(job_id) for name, job_id in jobs.items()}
    assert losses["left"] == losses["right"] == losses[HEAD]
    exported = {}
    for name, job in ended.items():
        joined.head.ok("export", job["fine_tuned_model"], str(joined.network[HEAD].folder / f"out-{name}"))
        exported[name] = (joined.network[HEAD].folder / f"out-{name}" / "model.safetensors").read_bytes()
    assert exported["left"] == exported["right"] == exported[HEAD]
    # A box keeps nothing of a job that has ended.
    left = [(joined[name].home, jobs[name]) for name in joined.others]
    _await(lambda: not any(list(home.rglob(f"{job_id}*")) for home, job_id in left), "the boxes discard their jobs")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_doctor_measures_the_network_between_all_boxes_and_leaves_no_port_open(joined: BoxService) -> None:
    rate = 100e6 / 8
    _await(lambda: all(box["link_host"] for box in joined.boxes().values()), "all boxes have told their addresses")
    joined.network["left"].shape(rate * 8)
    told = json.loads(joined.head.ok("doctor", "--network", "--json", timeout_s=DEADLINE_S))
    assert (told["problems"], told["left_out"]) == ([], [])
    pairs = {(pair["box"], pair["other_box"]): pair for pair in told["pairs"]}
    assert set(pairs) == {(HEAD, "left"), (HEAD, "right"), ("left", "right")}
    for names, pair in pairs.items():
        for way in ("there_bytes_per_s", "back_bytes_per_s"):
            # A shaped link is never faster than it is shaped, but for its burst, and the others are.
            assert (pair[way] < 1.2 * rate) == ("left" in names)
            assert pair[way] > rate / 2
        assert 0 < pair["round_trip_s"] < 1
    assert {port for _, port in joined.head.outer_listeners()} == {CLUSTER_PORT}
    for name in joined.others:
        assert joined[name].outer_listeners() == set()
    # The other boxes are measured without the one that is away.
    joined.network["left"].switch_off()
    joined.await_box("left", "away")
    told = joined.head.ok("doctor", "--network", timeout_s=DEADLINE_S)
    assert "1 of 1: head and right" in told
    assert "left was left out: it is away" in told


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_cut_link_costs_no_step_and_its_box_is_named_meanwhile(joined: BoxService, training_file: Path) -> None:
    job_id = joined.submit(training_file, *_JOB, box="left")
    other = joined.submit(training_file, *_JOB, box="right")
    step = joined.await_step(job_id, 3)
    joined.network["left"].cut()
    joined.await_box("left", "away")
    reason = joined.await_job(job_id, lambda job: job["windlass"]["waiting_reason"] is not None, "named")
    assert "left" in reason["windlass"]["waiting_reason"]
    assert joined.boxes()["right"]["state"] == "ready"
    joined.await_success(other)  # with the other box away
    assert joined.boxes()["left"]["state"] == "away"
    joined.network["left"].restore()
    joined.await_box("left", "ready")
    assert joined.await_step(job_id, step + 1) > step
    job = joined.await_success(job_id)
    assert (job["windlass"]["attempt"], job["windlass"]["waiting_reason"]) == (1, None)
    assert joined.losses(job_id) == joined.losses(other)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("killed", ["agent", "raylet", "dispatcher", "everything", "power"])
def test_whatever_dies_on_a_box_its_job_ends_with_the_same_losses(
    joined: BoxService, training_file: Path, killed: str
) -> None:
    job_id = joined.submit(training_file, *_JOB, box="left")
    undisturbed = joined.submit(training_file, *_JOB, box="right")
    joined.await_step(job_id, 3)
    box = joined.network["left"]
    if killed == "everything":
        box.kill_all()
    elif killed == "power":
        box.switch_off()
        joined.await_box("left", "away")
        box.switch_on()
    else:
        joined["left"].kill(killed)
    if killed in ("everything", "power"):
        joined.start_again("left")
    joined.await_box("left", "ready")
    joined.await_success(job_id)
    joined.await_success(undisturbed)
    assert joined.losses(job_id) == joined.losses(undisturbed)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_boxes_train_on_while_the_head_is_off(joined: BoxService, training_file: Path) -> None:
    job_id = joined.submit(training_file, *_JOB, box="left")
    joined.await_step(job_id, 3)
    joined.network[HEAD].switch_off()
    time.sleep(_CUT_S)
    assert joined["left"].role("raylet"), "Ray of the box ended with the head"
    joined.network[HEAD].switch_on()
    joined.start_again(HEAD)
    for name in joined.others:
        joined.await_box(name, "ready")
    job = joined.await_success(job_id)
    assert job["windlass"]["attempt"] == 1
    assert len(joined.losses(job_id)) == _NUM_STEPS


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_what_a_user_decides_while_a_box_is_away_happens_when_it_is_back(
    joined: BoxService, training_file: Path
) -> None:
    cancelled = joined.submit(training_file, *_ENDLESS, box="left")
    joined.await_step(cancelled, 3)
    joined.network["left"].cut()
    joined.await_box("left", "away")
    joined.head.ok("cancel", cancelled)
    joined.network["left"].restore()
    joined.await_job(cancelled, lambda job: job["status"] == "cancelled", "cancelled")
    # The box is free for the next.
    paused = joined.submit(training_file, *_ENDLESS, box="left")
    joined.await_step(paused, 3)
    joined.network["left"].cut()
    joined.head.ok("pause", paused)
    joined.network["left"].restore()
    step = joined.await_job(paused, lambda job: job["status"] == "paused", "paused")["windlass"]["step"]
    joined.head.ok("resume", paused)
    joined.await_step(paused, step + 2)
    joined.head.ok("cancel", paused)
    joined.await_job(paused, lambda job: job["status"] == "cancelled", "cancelled")


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_drained_box_gets_no_jobs_and_a_removed_one_gets_no_answer(joined: BoxService, training_file: Path) -> None:
    joined.head.ok("node", "drain", "left")
    joined.await_box("left", "draining")
    waiting = joined.submit(training_file, *_JOB, box="left")
    elsewhere = joined.submit(training_file, *_JOB, box="right")
    joined.await_success(elsewhere)
    job = joined.await_job(waiting, lambda job: job["windlass"]["waiting_reason"] is not None, "waits")
    assert job["status"] == "queued"
    assert "left" in job["windlass"]["waiting_reason"]
    joined.head.ok("node", "resume", "left")
    joined.await_success(waiting)

    joined["right"].ok("node", "leave", "--yes")
    joined.head.ok("node", "remove", "left", "--yes")
    _await(lambda: set(joined.boxes()) == {HEAD}, "only the head is listed")
    assert "removed" in " ".join(joined["left"].logs().split())


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_no_code_no_certificate_no_answer(boxes: BoxService) -> None:
    boxes.start_head()
    code = boxes.new_code()
    for wrong in (code[:-1] + ("0" if code[-1] != "0" else "1"), "x"):
        assert "code" in boxes["left"].refused(*boxes.join_arguments("left", wrong))
    boxes["left"].ok(*boxes.join_arguments("left", code), timeout_s=DEADLINE_S)
    assert "code" in boxes["right"].refused(*boxes.join_arguments("right", code)), "a code serves one box"
    # A program on a box, without the box's certificate.
    url = f"https://{boxes.network[HEAD].address}:{CLUSTER_PORT}/v1/node/sync"
    script = f"import httpx; print(httpx.post({url!r}, json={{}}, verify=False, trust_env=False).status_code)"
    done = boxes.network["right"].run("python3", "-c", script, environment=boxes["right"].environment)
    assert done.returncode != 0 or done.stdout.strip() in ("401", "403"), done.stdout
    # The API is not on the network.
    script = f"import socket; socket.create_connection(({boxes.network[HEAD].address!r}, 8642), 3)"
    assert boxes.network["right"].run("python3", "-c", script).returncode != 0


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_model_crosses_a_slow_link_once_and_the_head_stays_responsive(
    joined: BoxService, training_file: Path
) -> None:
    box = joined.network["left"]
    box.shape(4e6)
    nbytes = sum(path.stat().st_size for path in (joined.head.home / "models" / "tiny").iterdir())
    _, before = box.link_nbytes()
    first = joined.submit(training_file, *_JOB, box="left")
    joined.await_step(first, 1)
    _, between = box.link_nbytes()
    assert between - before > nbytes
    second = joined.submit(training_file, *_JOB, box="left")
    start = time.monotonic()
    assert httpx.get(f"{joined.head.url}/healthz", trust_env=False).is_success
    assert time.monotonic() - start < 5.0
    for job_id in (first, second):
        joined.await_success(job_id)
    _, after = box.link_nbytes()
    assert after - between < nbytes, "the second job fetched the model again"
    assert joined.losses(first) == joined.losses(second)


def _await(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.2)
