"""The start of an attempt of a job whose SSDs are in two boxes: which commit it resumes from, and what it leaves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.specs import make_spec
from tests.support.storage.direct_store import DirectStore
from tests.support.storage.stores import JOB, check, fill, make_geometry, open_volume, volume_file
from windlass.actors.job import JobSpec, ssd_name
from windlass.actors.runtime.start_up import START_DEADLINE_S, start_actors
from windlass.actors.scheduler import ActorLostError
from windlass.storage.ids import ActorName, Attempt, SsdIndex, Step
from windlass.storage.integrity.errors import StaleAttempt, StoreCorrupt
from windlass.storage.store import (
    DECISIONS_FILE,
    CommitRecord,
    Decision,
    DecisionLog,
    StoreGeometry,
    StoreJournal,
    last_decision,
    read_journal,
)

GEOMETRIES = {ssd_name(ssd): make_geometry(ssd=SsdIndex(ssd), ssd_weights=(1, 1)) for ssd in range(2)}


class Boxes:
    """Two boxes with an SSD each, and the calls by which the runner starts the actors there."""

    def __init__(self, directory: Path) -> None:
        self.directories = {name: directory / f"box{ssd}" for ssd, name in enumerate(GEOMETRIES)}
        for each in self.directories.values():
            each.mkdir()
        output_dir = directory / "models" / "out"
        output_dir.parent.mkdir()
        self.spec: JobSpec = make_spec(
            job_dir=str(directory / "job"),
            output_dir=str(output_dir),
            ssd_dirs=tuple(map(str, self.directories.values())),
        )
        self.log = directory / "job" / DECISIONS_FILE
        self.away: set[ActorName] = set()
        self.attempt = 0
        self.stores: dict[ActorName, DirectStore] = {}
        self.calls: list[str] = []
        self.before_open: Callable[[], None] = lambda: None

    def start(self) -> CommitRecord | None:
        """Starts the next attempt."""
        self.attempt += 1
        self.calls = []
        return start_actors([self.spec], self._call)

    def commit(self, step: int, *ssds: int, decides: bool = True) -> None:
        """Commits a step on all SSDs, or on some of them. Then it is decided, but by default only if all have it."""
        names = [ssd_name(ssd) for ssd in ssds] or list(self.stores)
        for name in names:
            store = self.stores[name]
            fill(store, step)
            store.prepare(Step(step), store.attempt, f'{{"step": {step}}}')
        if ssds or not decides:
            return
        record = self.stores[names[0]].last_commit()
        assert record is not None
        with closing(DecisionLog(self.log)) as log:
            log.append(Decision.of(record))
        for store in self.stores.values():
            store.decide(Step(step))

    def end(self) -> None:
        """Ends the attempt's processes."""
        for store in self.stores.values():
            store.volume.close()
        self.stores = {}

    def content(self) -> list[bytes]:
        return [volume_file(each).read_bytes() for each in self.directories.values()]

    def _call(
        self, names: Sequence[ActorName], method: str, *arguments: Any, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]:
        self.calls.append(method)
        if method == "open_space":
            self.before_open()
        answers = {}
        for name in names:
            if name in self.away:
                raise ActorLostError(f"the box of {name} is away")
            if name in GEOMETRIES:
                answers[name] = getattr(self, f"_{method}")(name, *arguments)
        return answers

    def _geometry(self, name: ActorName) -> StoreGeometry:
        return replace(GEOMETRIES[name], attempt=Attempt(self.attempt))

    def _read_journal(self, name: ActorName) -> StoreJournal:
        return read_journal(self.directories[name], self._geometry(name), direct=False)

    def _open_space(self, name: ActorName) -> StoreJournal:
        volume = open_volume(self.directories[name])
        is_new = JOB not in volume.allocations()
        store = (
            DirectStore.create(volume, self._geometry(name))
            if is_new
            else DirectStore.open(volume, JOB, Attempt(self.attempt))
        )
        self.stores[name] = store
        return StoreJournal(store.name, tuple(store.commits()))

    def _start(self, name: ActorName, commit: CommitRecord | None) -> None:
        self.stores[name].resume_from(commit)


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[Boxes]:
    boxes = Boxes(tmp_path)
    yield boxes
    boxes.end()


def test_hundred_starts_without_one_box_leave_no_trace(boxes: Boxes) -> None:
    assert boxes.start() is None
    for step in range(3):
        boxes.commit(step)
    boxes.commit(3, 0)
    boxes.end()
    before, log = boxes.content(), boxes.log.read_bytes()
    for number in range(100):
        boxes.away = {ssd_name(number % 2)}
        with pytest.raises(ActorLostError, match="is away"):
            boxes.start()
        assert boxes.calls == ["read_journal"], "a store is fenced before all journals are there"
    assert boxes.content() == before
    assert boxes.log.read_bytes() == log
    boxes.away = set()
    commit = boxes.start()
    assert commit is not None
    assert commit.step == 2
    for store in boxes.stores.values():
        check(store, 2)


def test_undecided_commit_of_all_boxes_is_decided_at_the_next_start(boxes: Boxes) -> None:
    boxes.start()
    boxes.commit(0)
    boxes.commit(1, decides=False)
    boxes.end()
    last = last_decision(boxes.log)
    assert last is not None
    assert last.step == 0
    commit = boxes.start()
    assert commit is not None
    assert commit.step == 1
    assert last_decision(boxes.log) == Decision.of(commit)
    boxes.commit(2)


def test_older_attempts_commit_between_the_two_looks_counts(boxes: Boxes) -> None:
    boxes.start()
    boxes.commit(0)
    older, boxes.stores = boxes.stores, {}

    def commit_late() -> None:
        newer, boxes.stores = boxes.stores, older
        boxes.commit(1)
        boxes.stores = newer

    boxes.before_open = commit_late
    commit = boxes.start()
    assert commit is not None
    assert commit.step == 1
    for store in older.values():
        with pytest.raises(StaleAttempt):
            fill(store, 2)
        store.volume.close()


def test_box_that_lost_a_decided_commit_stops_the_job_before_anything_is_written(boxes: Boxes) -> None:
    boxes.start()
    boxes.commit(0)
    boxes.end()
    old = boxes.content()[1]
    boxes.start()
    boxes.commit(1)
    boxes.end()
    lost = boxes.directories[ssd_name(1)]
    volume_file(lost).write_bytes(old)  # restored from a copy
    Path(f"{boxes.spec.output_dir}-step-7").mkdir()
    Path(f"{boxes.spec.output_dir}-step-12").mkdir()
    before = boxes.content()
    text = f"the job committed step 1 on all its SSDs, and SSD {lost} has no .* the last checkpoint, that of step 12"
    with pytest.raises(StoreCorrupt, match=text):
        boxes.start()
    assert boxes.calls == ["read_journal"]
    assert boxes.content() == before
