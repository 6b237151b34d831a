"""Slots of params that are released too early, whoever of several GPU workers still copies from them, are reported."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.races.checker import Kind
from tests.support.races.cuda import DEVICES
from tests.support.races.run import Recording, recorded
from tests.support.races.scenarios import reports_without
from tests.support.races.sites import sites
from windlass.actors.job.context import gpu_worker_name
from windlass.actors.messages import ParamsCopied, ParamUse, Phase, RequestParams
from windlass.actors.worker_policy.param_turns import ParamTurns
from windlass.engine.device.device import Device, copy
from windlass.engine.device.streams import Stream
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BlockIndex, ChunkKey, JobId, Span, Step

NUMEL = 1024
NBYTES = 4 * NUMEL
DEADLINE_S = 20.0
KEY = ChunkKey(BlockIndex(1), 0)

pytestmark = pytest.mark.usefixtures("one_thread")


class Stage:
    """One slot, from which two GPU workers copy a chunk's params."""

    def __init__(self, recording: Recording) -> None:
        self.checker = recording.checker
        self.host = torch.zeros(NUMEL)
        recording.memory.add_arena(self.host, "stage")
        self.token = CancelToken(DEADLINE_S)
        self.devices = [Device(device, token=self.token) for device in DEVICES]
        self.turns = ParamTurns([Span(0, NBYTES)], batch=1, num_kept=1)

    def request(self, block: int) -> ParamUse:
        """Requests the params of a block for both GPU workers."""
        use = ParamUse(Step(1), Phase.FORWARD, 0, BlockIndex(block), BlockIndex(block))
        for rank in range(2):
            message = RequestParams(
                job=JobId("job"), step=Step(0), reply_to=gpu_worker_name(rank), use=use, num_users=2, keys=(KEY,)
            )
            self.turns.request(message)
        return use

    def read(self, use: ParamUse) -> None:
        """Reads the params into the slot."""
        self.host.fill_(1)
        self.turns.arrived(use, KEY)

    def copy(self, rank: int) -> Stream:
        """Queues a GPU worker's copy from the slot."""
        stream = self.devices[rank].h2d
        stream.run(lambda: copy(torch.empty(NUMEL, device=DEVICES[rank]), self.host))
        return stream

    def has_copied(self, rank: int, use: ParamUse, after: Stream | None) -> None:
        """Tells in another thread that a GPU worker has copied from the slot, after a stream's work."""

        def tell() -> None:
            if after is not None:
                after.record().wait()
            self.turns.copied(
                ParamsCopied(job=JobId("job"), step=Step(1), actor=gpu_worker_name(rank), use=use, keys=(KEY,))
            )

        thread = threading.Thread(target=tell)
        thread.start()
        while thread.is_alive():  # tells this thread nothing that the checker follows
            pass

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of reports, without those of waits: threads of a test wait for the device."""
        return [report.kind for report in self.checker.finish() if report.kind is not Kind.HOST_WAIT]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with recorded() as recording:
        stage = Stage(recording)
        yield stage
        stage.token.cancel()


def test_a_slot_from_which_all_have_copied_is_used_again(stage: Stage) -> None:
    use, _ = stage.request(1), stage.request(2)
    stage.read(use)
    first, second = stage.copy(0), stage.copy(1)
    stage.has_copied(1, use, second)
    stage.has_copied(0, use, first)  # releases the slot, and knows nothing of the other copy
    assert stage.turns.num_free == 0  # the next use has it
    assert stage.kinds == []


@pytest.mark.parametrize("early", [0, 1])
def test_a_copy_that_is_not_over_is_reported(stage: Stage, early: int) -> None:
    use = stage.request(1)
    stage.read(use)
    copies = [stage.copy(rank) for rank in range(2)]
    for rank, stream in enumerate(copies):
        stage.has_copied(rank, use, None if rank == early else stream)
    assert stage.kinds == [Kind.EARLY_RELEASE]


def test_the_slot_may_not_be_used_while_it_is_free(stage: Stage) -> None:
    use = stage.request(1)
    stage.read(use)
    for rank in range(2):
        stage.has_copied(rank, use, stage.copy(rank))
    stage.copy(0)
    assert stage.kinds == [Kind.RELEASED_SLOT]


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["job: active", "job: ranks"])
def test_a_job_that_does_not_wait_for_its_copies_is_reported(tmp_path: Path, scenario: str) -> None:
    site = next(site for site in sites() if site.call == "ParamLoader.run: h2d.then")
    assert Kind.EARLY_RELEASE in {report.kind for report in reports_without(site, scenario, tmp_path)}
