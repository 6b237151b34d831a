"""States move between boxes that reach each other only over sockets, as threads and as processes that are killed."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.moving_job import ONE_BOX, MovingJob, epochs_on
from tests.support.actors.stage_runs import STAGES
from tests.support.storage.links import quick
from tests.unit.actors.parity.boxes.test_linked_stages import ends, relays_of
from windlass.actors.runtime.boxes.box_link import LinkEnd
from windlass.actors.runtime.boxes.first_box import BoxFailedError
from windlass.actors.runtime.moving.chunk_transfers import ChunkTransfers
from windlass.actors.runtime.moving.division import MoveSpec
from windlass.actors.runtime.moving.lead import Moved
from windlass.actors.runtime.moving.linked_move import move_over_link
from windlass.actors.runtime.moving.mover import Mover
from windlass.actors.scheduler import ActorLostError
from windlass.engine.model.layout import ModelLayout
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.decisions import DecisionLog

_WAIT_S = 120.0


def move_in_threads(job: MovingJob, specs: Sequence[MoveSpec], links: Sequence[LinkEnd], **options: Any) -> Moved:
    """Moves with a thread for each box, and returns what the first one returns."""
    with ThreadPoolExecutor(len(specs)) as pool:
        results: list[Future[Moved | None]] = [
            pool.submit(move_over_link, spec, job.layout, link, direct=False, **(options if not spec.box else {}))
            for spec, link in zip(specs, links, strict=True)
        ]
        for result in results[1:]:
            result.exception(_WAIT_S)
        moved = results[0].result(_WAIT_S)
    assert moved is not None
    return moved


@pytest.mark.long
def test_all_bytes_cross_sockets_that_are_cut(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job")
    states = job.commit(7)
    progress: list[int] = []
    for number, division in enumerate((STAGES["2-3"], STAGES["1-3-1"], ONE_BOX)):
        with relays_of() as relays:
            specs = job.moves(division)
            links = ends(tmp_path / f"links{number}", len(specs), relays)
            for relay in relays:
                relay.cut_after(40_000)
            assert move_in_threads(job, specs, links, on_progress=progress.append).step == 7
            assert sum(relay.num_cuts for relay in relays) > 0
        job.moved(division)
        assert job.states(7) == states
        assert set().union(*epochs_on(specs)) == {job.epoch}


def test_a_box_without_room_ends_the_move_on_all_and_no_new_store_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)
    free_nbytes = Volume.free_nbytes

    def little(self: Volume) -> int:
        return 4096 if "box-2" in str(self.path) else free_nbytes(self)

    specs = job.moves(STAGES["2-1-2"])
    with monkeypatch.context() as patch:
        patch.setattr(Volume, "free_nbytes", little)
        with pytest.raises(BoxFailedError, match=r"box 'south': .*box-2.*4.00 KiB"):
            move_in_threads(job, specs, ends(tmp_path / "links", 3))
    assert epochs_on(specs) == [{0}, {0}, set()]
    assert job.states(3) == states


def test_a_box_that_is_not_there_is_named_with_its_layers(tmp_path: Path) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    job.commit(3)
    specs = job.moves(ONE_BOX)
    first, east = ends(
        tmp_path / "links", 2, settings=quick(heartbeat_s=0.1, stall_s=0.5, silence_s=1.0, connect_s=1.0)
    )
    east.listener.close()
    lost = r"box 'east'.*; it has the states of layers 2 to 3 and the head, which no other box has: bring it back, or"
    with pytest.raises(ActorLostError, match=lost):
        move_over_link(specs[0], job.layout, first, direct=False)
    assert epochs_on(specs) == [{0}, {0}]


# --- boxes that are processes ---------------------------------------------------------------------------------------


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(place: str) -> None:
    """Kills this process at a place of a move."""
    method, _, when = place.partition(" ")
    if when == "decided":
        append = DecisionLog.append

        def decide(self: DecisionLog, decision: Any) -> None:
            append(self, decision)
            _kill()

        DecisionLog.append = decide  # type: ignore[method-assign]
        return
    kind = ChunkTransfers if method.startswith("_") else Mover
    act = getattr(kind, method)

    def carry_out(self: Any, *arguments: Any) -> Any:
        if when == "before":
            _kill()
        act(self, *arguments)
        _kill()

    setattr(kind, method, carry_out)


def _take_part(spec: MoveSpec, layout: ModelLayout, end: LinkEnd, dies_at: str) -> None:
    if dies_at:
        _die_at(dies_at)
    try:
        move_over_link(spec, layout, end, direct=False)
    except ActorLostError:
        os._exit(3)


def move_in_processes(
    job: MovingJob, specs: Sequence[MoveSpec], root: Path, dying: int, dies_at: str
) -> list[int | None]:
    """Moves with a process for each box, of which one may die. Returns their exit codes."""
    # A server that has imported everything makes them, because importing takes longer than a move.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    links = ends(root, len(specs), settings=quick(connect_s=120.0, silence_s=5.0))
    processes = [
        server.Process(target=_take_part, args=(spec, job.layout, link, dies_at if spec.box == dying else ""))
        for spec, link in zip(specs, links, strict=True)
    ]
    try:
        for process, link in zip(processes, links, strict=True):
            process.start()
            link.listener.close()
        for process in processes:
            process.join(_WAIT_S)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("dying", "dies_at"),
    [
        (0, "prepare after"),
        (0, "move after"),
        (0, "append decided"),
        (0, "finish before"),
        (1, "prepare before"),
        (1, "_send before"),
        (1, "move after"),
        (1, "finish before"),
        (2, "_receive after"),
        (2, "finish after"),
    ],
)
def test_a_killed_box_loses_nothing_and_the_next_move_is_whole(tmp_path: Path, dying: int, dies_at: str) -> None:
    job = MovingJob.make(tmp_path / "job", STAGES["2-3"])
    states = job.commit(3)
    codes = move_in_processes(job, job.moves(STAGES["1-3-1"]), tmp_path / "links", dying, dies_at)
    assert codes[dying] == -signal.SIGKILL
    assert all(code in (0, 3) for box, code in enumerate(codes) if box != dying)
    specs = job.moves(STAGES["1-3-1"])
    assert move_in_processes(job, specs, tmp_path / "again", dying, "") == [0, 0, 0]
    job.moved(STAGES["1-3-1"])
    assert epochs_on(specs) == [{1}, {1}, {1}]
    assert job.states(3) == states
