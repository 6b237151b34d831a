"""A job in stages over boxes with a Ray of their own: the bits of one process, and an end for every failure."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_ray_training import Driver, num_steps, wait_for
from tests.pretend_gpus import pretend_gpus, visible_gpus
from tests.support.actors.moving_job import ONE_BOX, MovingJob, epochs_on
from tests.support.actors.stage_runs import STAGES, run
from tests.support.actors.whole_jobs import Run, grouped, job
from tests.support.storage.links import SECRET, Authority, quick
from tests.support.training import boxes_of, journal_of, leftovers_of
from tests.unit.actors.parity.boxes.test_linked_stages import NAMES
from windlass.actors.job.journal import JournalRecord
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.boxes import LinkConfig
from windlass.actors.runtime.moving.division import MoveSpec
from windlass.service.machine.ray_cluster import RayCluster
from windlass.storage.ids import Attempt, Precision
from windlass.storage.link import LinkSettings, listen

pytestmark = pytest.mark.long

NUM_BOXES = 2
CHANGES: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "total_steps": 4}
# A process that starts has PyTorch to load.
SETTINGS = quick(connect_s=120.0)


@dataclass
class Box:
    """A box: its Ray daemon, and a process that is connected to that."""

    cluster: RayCluster
    driver: Driver

    def process(self, name: str) -> psutil.Process:
        """The process of an actor class on this box."""
        children = (each for pid in self.cluster.pids for each in psutil.Process(pid).children(recursive=True))
        return next(each for each in children if each.cmdline()[0].startswith(f"ray::{name}"))


@pytest.fixture(scope="module")
def boxes(direct_home: Path) -> Iterator[list[Box]]:
    """Boxes of one machine, each with a simulated GPU."""
    with ExitStack() as stack:
        made = []
        for name in NAMES[:NUM_BOXES]:
            home = direct_home / name
            home.mkdir()
            cluster = RayCluster(home)
            stack.callback(cluster.stop)
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in pretend_gpus(2).items():
                    patch.setenv(variable, value)
                cluster.ensure_running(num_cpus=2, num_gpus=2)
            driver = Driver(home, home)
            stack.callback(driver.kill)
            made.append(Box(cluster, driver))
        yield made


def configs(root: Path, settings: LinkSettings) -> list[LinkConfig]:
    """Returns what each box is told about the others."""
    root.mkdir()
    authority, names = Authority(root), NAMES[:NUM_BOXES]
    addresses = {}
    for name in names:
        with listen("127.0.0.1") as listener:
            addresses[name] = ("127.0.0.1", int(listener.getsockname()[1]))
    return [
        LinkConfig(
            names=names,
            address=addresses[name],
            addresses={other: address for other, address in addresses.items() if other != name},
            certificates=authority.certificates(name),
            secret=SECRET,
            settings=settings,
        )
        for name in names
    ]


def start(boxes: Sequence[Box], specs: Sequence[JobSpec], root: Path, settings: LinkSettings = SETTINGS) -> None:
    for index, config in reversed(list(enumerate(configs(root, settings)))):
        boxes[index].driver.start_box(specs, index, config)


def await_ends(boxes: Sequence[Box], specs: Sequence[JobSpec]) -> None:
    """Waits until the runners of all boxes have ended."""
    for box, spec in zip(boxes, specs, strict=True):
        wait_for(lambda: not box.driver.ask("find", spec.job, spec.attempt), f"box {spec.box}", spec)  # noqa: B023


def errors_of(spec: JobSpec) -> str:
    path = Path(spec.job_dir, "error.txt")
    return path.read_text() if path.exists() else ""


def test_boxes_with_a_ray_each_have_the_bits_of_one_process(boxes: list[Box], tmp_path: Path) -> None:
    """The second box has the head and two GPU workers, which use the first one's embedding, too."""
    changes = {**CHANGES, "tied": True}
    one = run(tmp_path / "one", **changes)
    spec = job(tmp_path / "apart", lanes=1, **changes)
    specs = boxes_of(grouped(spec, 1), STAGES["2-3"], (1, 2))
    start(boxes, specs, tmp_path / "links")
    outcome = boxes[0].driver.await_end(specs[0])
    assert outcome["status"] == "succeeded", (outcome, errors_of(spec))
    await_ends(boxes, specs)
    Run.of(spec).assert_equals(one)
    assert [errors_of(each) for each in specs] == [""] * len(specs)
    assert [leftovers_of(each) for each in specs] == [[]] * len(specs)
    seen = [visible_gpus(Path(each.job_dir)) for each in specs]
    assert [{name: gpus for name, gpus in of_box.items() if gpus} for of_box in seen] == [
        {"gpu-0": "0"},
        {"b1/gpu-0": "0", "b1/gpu-1": "1"},
    ]


# The first box's runner writes no outcome when it is killed. The other box ends by itself.
@pytest.mark.parametrize("victim", [0, 1])
def test_a_box_whose_runner_is_killed_ends_the_attempt_and_the_next_one_goes_on(
    boxes: list[Box], tmp_path: Path, victim: int
) -> None:
    changes = CHANGES | {"total_steps": 20, "evaluate_every": None}
    one = run(tmp_path / "one", **changes)
    spec = job(tmp_path / "apart", lanes=1, **changes)
    specs = boxes_of(grouped(spec, 1), STAGES["2-3"])
    start(boxes, specs, tmp_path / "links", quick(connect_s=120.0, silence_s=5.0))
    wait_for(lambda: num_steps(spec) >= 2, "the first steps", spec)
    boxes[victim].process(("LeadRunner", "BoxRunner")[victim]).kill()
    await_ends(boxes, specs)
    outcomes = [record for record in journal_of(spec) if record.kind == "outcome"]
    if victim:
        assert [each.data["error"]["code"] for each in outcomes] == ["process_lost"]
        assert "box 'east'" in outcomes[0].message
    else:
        assert outcomes == []
        assert "box 'north' was silent" in errors_of(specs[1])
    assert num_steps(spec) < 20

    again = [dataclasses.replace(each, attempt=Attempt(2)) for each in specs]
    start(boxes, again, tmp_path / "again")
    await_ends(boxes, again)
    Run.of(spec).assert_equals(one)
    assert [leftovers_of(each) for each in specs] == [[]] * len(specs)


@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_a_job_that_is_cancelled_ends_on_all_boxes(boxes: list[Box], tmp_path: Path, num_steps_before: int) -> None:
    spec = job(tmp_path / "apart", lanes=1, **(CHANGES | {"total_steps": 2000}))
    specs = boxes_of(grouped(spec, 1), STAGES["2-3"])
    start(boxes, specs, tmp_path / "links")
    wait_for(lambda: num_steps(spec) >= num_steps_before, "the first steps", spec)
    boxes[0].driver.cancel(specs[0])
    assert boxes[0].driver.await_end(specs[0])["status"] == "cancelled"
    await_ends(boxes, specs)
    assert [errors_of(each) for each in specs] == [""] * len(specs)
    assert [leftovers_of(each) for each in specs] == [[]] * len(specs)


def move(boxes: Sequence[Box], moves: Sequence[MoveSpec], root: Path) -> list[JournalRecord]:
    """Moves with the runners of all boxes, and returns the records of that attempt."""
    for each, config in reversed(list(zip(moves, configs(root, SETTINGS), strict=True))):
        boxes[each.box].driver.start_move(each, config)
    await_ends(boxes, [each.any for each in moves])
    return records_of(moves[0])


def records_of(first: MoveSpec) -> list[JournalRecord]:
    return [record for record in journal_of(first.any) if record.attempt == first.any.attempt]


def test_the_states_move_between_boxes_with_a_ray_each_and_back(boxes: list[Box], tmp_path: Path) -> None:
    moving = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = moving.commit(7)
    for number, division in enumerate((STAGES["4-1"], ONE_BOX)):
        moves = moving.moves(division)
        records = move(boxes, moves, tmp_path / f"links{number}")
        [moved] = moves[0].moved(moving.layout)
        assert [record.message for record in records] == [f"Moving {moved}", f"Moved the states of step 7: {moved}"]
        assert records[-1].data["status"] == "moved", errors_of(moves[0].any)
        moving.moved(division)
        assert moving.states(7) == states
        assert set().union(*epochs_on(moves)) == {moving.epoch}
        assert [errors_of(each.any) for each in moves] == ["", ""]


def test_a_move_whose_other_box_is_away_ends_and_the_next_one_is_whole(boxes: list[Box], tmp_path: Path) -> None:
    moving = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = moving.commit(7)
    first, _ = moving.moves(ONE_BOX)
    links = configs(tmp_path / "links", quick(connect_s=5.0, silence_s=5.0))
    boxes[0].driver.start_move(first, links[0])  # the other box's runner never begins
    await_ends(boxes[:1], [first.any])
    [outcome] = records_of(first)
    assert outcome.data["status"] == "interrupted"
    assert "it has the states of layers 2 to 3 and the head" in outcome.data["error"]["message"]
    assert move(boxes, moving.moves(ONE_BOX), tmp_path / "again")[-1].data["status"] == "moved"
    moving.moved(ONE_BOX)
    assert moving.states(7) == states
