"""The assignment of pieces to buffers, and the order of copies and uses."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest
import torch

from tests.support.late_streams import LateStreams
from windlass.engine.device import device as device_module
from windlass.engine.device.device import Device, copy
from windlass.engine.device.streams import Event
from windlass.engine.model.streaming.params import PieceBuffers, PieceBuffersHeldError, StreamedParams
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BlockIndex

DEADLINE_S = 20.0
F32 = torch.float32
BOUNDS = (0, 3, 5, 8, 11)
FLAT = torch.arange(12, dtype=F32)
FORWARD = [(piece, False) for piece in range(4)]
BACKWARD = [(piece, True) for piece in (3, 2, 1, 0)]


@dataclass
class Source:
    """Records the copied pieces."""

    loads: list[int] = field(default_factory=list)
    on_load: Callable[[torch.Tensor], None] = lambda target: None

    def load(self, target: torch.Tensor, start: int) -> None:
        self.loads.append(BOUNDS.index(start))
        copy(target, FLAT[start : start + target.numel()])
        self.on_load(target)

    def loaded(self, begun: Event, copied: Event, nbytes: int) -> None:
        pass


def make(device: Any, source: Source | None = None) -> tuple[PieceBuffers, StreamedParams]:
    buffers = PieceBuffers(device, 3, F32, 2)
    return buffers, StreamedParams(buffers, source or Source(), BOUNDS, FLAT[11:])


def use(buffers: PieceBuffers, pieces: Sequence[tuple[int, bool]]) -> list[list[float]]:
    """Holds the pieces one after the other, and returns their contents."""
    found = []
    for piece, backward in pieces:
        found.append(buffers.hold(piece, backward=backward).tolist())
        buffers.release(piece)
    return found


def expected(pieces: Sequence[tuple[int, bool]]) -> list[list[float]]:
    return [FLAT[BOUNDS[piece] : BOUNDS[piece + 1]].tolist() for piece, _ in pieces]


@pytest.fixture(params=[False, True], ids=["plain", "poisoned"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device(torch.device("cpu"), poison_released=request.param)
    yield device
    device.token.cancel()


def test_pieces_are_copied_on_request(device: Device) -> None:
    buffers, params = make(device)
    for _ in range(3):
        buffers.begin(params, BlockIndex(1), goes_backward=True)
        assert use(buffers, FORWARD + BACKWARD) == expected(FORWARD + BACKWARD)
        buffers.end()


@pytest.mark.parametrize("device", [False], indirect=True)
def test_last_released_pieces_are_reused_in_backward(device: Device) -> None:
    source = Source()
    buffers, params = make(device, source)
    buffers.begin(params, BlockIndex(1), goes_backward=True)
    use(buffers, FORWARD + BACKWARD)
    buffers.end()
    assert source.loads == [0, 1, 2, 3, 1, 0]
    buffers.begin(params, BlockIndex(1), goes_backward=True)
    buffers.hold(0, backward=False)
    buffers.end()
    # the buffers may hold other pieces by now, and the pieces that followed last time are prefetched
    assert source.loads[6:] == [0, 1]


@pytest.mark.parametrize("device", [False], indirect=True)
def test_first_piece_is_copied_when_an_operation_begins(device: Device) -> None:
    source = Source()
    buffers, params = make(device, source)
    for goes_backward, pieces in ((False, FORWARD), (True, BACKWARD)):
        buffers.begin(params, BlockIndex(1), goes_backward=goes_backward)
        buffers.end()
        assert source.loads == []  # the order is not known yet
        buffers.begin(params, BlockIndex(1), goes_backward=goes_backward)
        use(buffers, pieces)
        source.loads.clear()
        buffers.begin(params, BlockIndex(1), goes_backward=goes_backward)
        buffers.end()
        assert source.loads == [pieces[0][0]]
        source.loads.clear()
    buffers.begin(params, BlockIndex(2), goes_backward=False)
    buffers.end()
    assert source.loads == []  # another block may use another order


@pytest.mark.parametrize("device", [False], indirect=True)
@pytest.mark.parametrize("way", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_the_next_micro_batch_begins_where_this_one_did_and_nothing_follows_the_last(
    device: Device, way: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "open_stream", lambda: device.h2d)  # copies at once
    source = Source()
    buffers, params = make(device, source)
    first, *_, last = (piece for piece, _ in way)
    copied_last = []
    for _ in range(2):
        buffers.begin(params, BlockIndex(1), goes_backward=True)
        for is_last in (False, False, True):
            buffers.is_last = is_last
            use(buffers, way)
            copied_last.append(source.loads[-1])
        buffers.end()
    assert copied_last == [last, first, last, first, first, last]  # at first the order is not known


def test_a_piece_more_than_there_are_buffers_is_refused(device: Device) -> None:
    buffers, params = make(device)
    buffers.begin(params, BlockIndex(1), goes_backward=False)
    for piece in (2, 0, 2):
        buffers.hold(piece, backward=False)
    with pytest.raises(
        PieceBuffersHeldError, match=r"needs more than 2 pieces at once; leave it out of streamed_blocks"
    ):
        buffers.hold(1, backward=False)
    buffers.release(2)
    with pytest.raises(PieceBuffersHeldError):
        buffers.hold(1, backward=False)
    buffers.release(2)
    assert buffers.hold(1, backward=False).tolist() == [3.0, 4.0]
    buffers.end()


@pytest.mark.parametrize("device", [True], indirect=True)
def test_released_buffer_is_filled_with_nan_on_request(device: Device) -> None:
    buffers, params = make(device)
    buffers.begin(params, BlockIndex(1), goes_backward=False)
    held = buffers.hold(0, backward=False)
    buffers.hold(0, backward=False)
    buffers.release(0)
    assert held.tolist() == [0.0, 1.0, 2.0]
    buffers.release(0)
    assert held.isnan().all()


def test_tensors_in_a_piece_are_found(device: Device) -> None:
    buffers, params = make(device)
    buffers.begin(params, BlockIndex(1), goes_backward=False)
    first, third = buffers.hold(0, backward=False), buffers.hold(2, backward=False)
    assert buffers.place_of(first[1:]) == 4
    assert buffers.place_of(third.view(3, 1).t()) == 20
    assert buffers.place_of(FLAT) is None
    buffers.end()
    assert buffers.place_of(first) is None


# --- streams --------------------------------------------------------------------------------------------------------


class _Clocked:
    """A stream whose events contain everything that is known to be done when they are reached."""

    def __init__(self) -> None:
        self.known: frozenset[int] = frozenset()

    def run(self, work: Callable[[], object]) -> None:
        work()

    def wait(self, event: Any) -> None:
        self.known |= event

    def record(self) -> Any:
        return self.known

    def then(self, callback: Callable[[], None]) -> None:
        pass


class _ClockedDevice:
    """Records which uses of which memory come before which others."""

    device = torch.device("cpu")
    poisons_released = False

    def __init__(self) -> None:
        self.compute, self.copies = _Clocked(), _Clocked()
        self.uses: dict[int, list[tuple[int, str, frozenset[int]]]] = defaultdict(list)  # by address
        self._num_uses = 0

    def open_stream(self) -> _Clocked:
        return self.copies

    def use(self, stream: _Clocked, kind: str, tensor: torch.Tensor) -> None:
        self._num_uses += 1
        self.uses[tensor.data_ptr()].append((self._num_uses, kind, stream.known))
        stream.known |= {self._num_uses}


def test_copies_and_computation_take_turns_in_a_buffer_and_wait_for_nothing_else() -> None:
    device, elsewhere = _ClockedDevice(), torch.empty(1)
    source = Source(on_load=lambda target: device.use(device.copies, "copy", target))
    buffers, params = make(device, source)
    for _ in range(2):
        buffers.begin(params, BlockIndex(1), goes_backward=True)
        for piece, backward in FORWARD + BACKWARD:
            device.use(device.compute, "use", buffers.hold(piece, backward=backward))
            buffers.release(piece)
            device.use(device.compute, "something else", elsewhere)
        buffers.end()
    others = [number for number, _, _ in device.uses.pop(elsewhere.data_ptr())]
    assert len(device.uses) == 2
    for uses in device.uses.values():
        for i, (number, kind, known) in enumerate(uses):
            assert {earlier for earlier, _, _ in uses[:i]} <= known
            latest = max((other for other in others if other < number), default=None)
            assert kind == "use" or latest not in known


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("order", [*permutations(("compute", "h2d", "d2h")), 3], ids=str)
def test_streamed_params_on_late_streams_are_right(order: Any, forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`forgets`: without the waits of the compute stream for copies the results differ."""
    opened: list[LateStreams] = []

    def open_streams(device: torch.device, token: CancelToken, start_threads: Any) -> LateStreams:
        forgotten = ("compute", "d2h") if forgets else None  # the name of the stream that is opened first
        opened.append(LateStreams(start_threads, token=token, order=order, forgets=lambda *pair: pair == forgotten))
        return opened[-1]

    monkeypatch.setattr(device_module, "open_streams", open_streams)
    device = Device(torch.device("cpu"), poison_released=True)
    buffers, params = make(device)
    found: list[list[float]] = []

    def operation() -> None:
        buffers.begin(params, BlockIndex(1), goes_backward=True)
        found.extend(use(buffers, FORWARD + BACKWARD))
        buffers.end()

    for _ in range(3):
        device.compute.run(operation)
    assert not opened[0].host_waits
    device.compute.record().wait()
    device.token.cancel()
    assert (found == expected(FORWARD + BACKWARD) * 3) is not forgets
