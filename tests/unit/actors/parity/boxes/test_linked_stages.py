"""Boxes in one process that reach each other only over sockets: the same losses and params to the bit as on one box."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.stage_runs import PLACES, STAGES, half_exported, run, run_attempt, train
from tests.support.actors.whole_jobs import Run, grouped, job
from tests.support.storage.cutting_relay import CuttingRelay
from tests.support.storage.links import SECRET, Authority, quick
from tests.support.training import boxes_of, metrics_of
from windlass.actors.messages import Message, OfferParams, PullSpan, SpanPulled
from windlass.actors.runtime.boxes.box_link import BoxLink, LinkEnd
from windlass.actors.runtime.local_box import LocalBox
from windlass.actors.runtime.local_runner import ConnectBoxes
from windlass.storage.ids import ActorName, Attempt, BoxName, Precision
from windlass.storage.link import LinkSettings, listen
from windlass.storage.memory.arena import Arena

NAMES = BoxName("north"), BoxName("east"), BoxName("south")


def over_sockets(ends: Sequence[LinkEnd]) -> ConnectBoxes:
    """Connects the boxes of one process over sockets. `ends` has one for each box. See `run_local`."""

    def connect(boxes: Sequence[LocalBox], arenas: Sequence[Arena], ending: ExitStack) -> None:
        for box, arena, end in zip(boxes, arenas, ends, strict=True):
            link = BoxLink(box.context.spec, end)
            ending.callback(link.stop)
            box.add_link(link, link.send)
            link.open(arena, send=box.send, deliver=box.deliver)

    return connect


@contextmanager
def relays_of() -> Iterator[list[CuttingRelay]]:
    """The relays that `ends` makes, one for each box."""
    with ExitStack() as stack:
        relays: list[CuttingRelay] = []
        stack.callback(lambda: [each.close() for each in relays])
        yield relays


def ends(
    root: Path, num_boxes: int, relays: list[CuttingRelay] | None = None, settings: LinkSettings | None = None
) -> list[LinkEnd]:
    """The ends of links of boxes; others reach a box through its relay if there are relays."""
    root.mkdir(exist_ok=True)
    authority, names = Authority(root), NAMES[:num_boxes]
    listeners = {name: listen("127.0.0.1") for name in names}
    ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    if relays is not None:
        relays.extend(map(CuttingRelay, ports.values()))
        ports = dict(zip(names, (each.port for each in relays), strict=True))
    return [
        LinkEnd(
            names=names,
            listener=listeners[name],
            addresses={other: ("127.0.0.1", ports[other]) for other in names if other != name},
            certificates=authority.certificates(name),
            secret=SECRET,
            settings=settings or quick(),
        )
        for name in names
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("tied", "precision", "place", "lanes", "division", "group_size", "ranks"),
    [
        pytest.param(False, Precision.BF16, "some params stay", 2, "2-3", 1, (2, 2), marks=pytest.mark.long),
        pytest.param(False, Precision.BF16, "SSDs", 2, "2-3", 1, (1, 3), marks=pytest.mark.long),
        pytest.param(True, Precision.BF16, "SSDs", 2, "2-3", 1, (1, 3), marks=pytest.mark.long),
        pytest.param(True, Precision.FP32, "some params stay", 1, "2-1-2", 2, (2, 1, 2), marks=pytest.mark.long),
        (True, Precision.FP16, "mixed", 1, "2-1-2", 2, ()),  # the first box and the last one share the embedding
        pytest.param(False, Precision.FP32, "SSDs", 1, "1-3-1", 1, (), marks=pytest.mark.long),
    ],
)
def test_sockets_between_boxes_change_no_bit(
    tmp_path: Path,
    precision: Precision,
    place: str,
    lanes: int,
    division: str,
    group_size: int,
    ranks: tuple[int, ...],
    *,
    tied: bool,
) -> None:
    changes: dict[str, Any] = {
        "tied": tied,
        "precision": precision,
        "clip_norm": 0.5,
        "lanes": lanes,
        "placement": PLACES[place],
        "num_microbatches": 4,
        "total_steps": 4,
    }
    one = run(tmp_path / "one", **changes)
    spec = grouped(job(tmp_path / "linked", **changes), group_size)
    stages = STAGES[division]
    train(spec, stages, ranks, connect=over_sockets(ends(tmp_path / "links", len(stages))))
    Run.of(spec).assert_equals(one)
    links = {(link["from"], link["to"]): link for link in metrics_of(spec, "timeline")[4]["links"]}
    boxes = [f"box {index}" for index in range(len(stages))]
    expected = set(itertools.pairwise(boxes)) | ({(boxes[0], boxes[-1])} if tied else set())
    assert set(links) == expected | {(target, source) for source, target in expected}
    assert all(link["busy_s"] > 0 and link["moved_bytes"] > 0 for link in links.values())


def test_connections_that_are_cut_in_every_step_change_no_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": Precision.BF16, "clip_norm": 0.5, "total_steps": 4, "tied": True}
    one = run(tmp_path / "one", **changes)
    spec = grouped(job(tmp_path / "linked", lanes=1, **changes), 1)
    with relays_of() as relays:
        counter = itertools.count(1)

        def cut_some(to: ActorName, message: Message) -> None:
            if isinstance(message, PullSpan | SpanPulled) and next(counter) % 13 == 0:
                for relay in relays:
                    relay.cut_after(1 + 500 * message.step)

        train(spec, STAGES["2-3"], on_message=cut_some, connect=over_sockets(ends(tmp_path / "links", 2, relays)))
        assert sum(relay.num_cuts for relay in relays) >= 4
    Run.of(spec).assert_equals(one)


@pytest.mark.long
def test_connections_that_are_cut_during_an_export_change_no_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": Precision.BF16, "evaluate_every": None, "total_steps": 1}
    one = run(tmp_path / "one", **changes)
    spec = job(tmp_path / "linked", lanes=1, **changes)
    with relays_of() as relays:

        def cut(to: ActorName, message: Message) -> None:
            if isinstance(message, OfferParams) and message.key.chunk == 1:
                for relay in relays:
                    relay.cut_after(5000)

        train(spec, STAGES["2-3"], on_message=cut, connect=over_sockets(ends(tmp_path / "links", 2, relays)))
        assert sum(relay.num_cuts for relay in relays) >= 2
    Run.of(spec).assert_equals(one)


def in_step(message: Message) -> bool:
    return isinstance(message, PullSpan) and message.step == 2


def in_export(message: Message) -> bool:
    """In the middle: the first box has chunks of another one, and asks for more."""
    return isinstance(message, OfferParams) and message.key.block == 3


@pytest.mark.parametrize("is_cut", [pytest.param(in_step, marks=pytest.mark.long), in_export])
def test_a_box_that_stays_away_interrupts_the_attempt_and_the_next_one_goes_on(
    tmp_path: Path, is_cut: Callable[[Message], bool]
) -> None:
    changes: dict[str, Any] = {"precision": Precision.BF16, "num_validation_examples": 0, "total_steps": 3}
    whole = run(tmp_path / "whole", **changes)
    spec = grouped(job(tmp_path / "cut", lanes=1, **changes), 2)
    with relays_of() as relays:

        def cut(to: ActorName, message: Message) -> None:
            if is_cut(message):
                for relay in relays:
                    relay.cut(stay_down=True)

        settings = quick(heartbeat_s=0.1, stall_s=0.5, silence_s=1.0)
        connect = over_sockets(ends(tmp_path / "links", 2, relays, settings))
        outcome = run_attempt(*boxes_of(spec, STAGES["2-3"]), on_message=cut, connect=connect)
    assert (outcome["status"], outcome["error"]["code"]) == ("interrupted", "process_lost")
    assert "box 'east'" in outcome["error"]["message"]
    assert half_exported(spec) == []
    assert not Path(spec.output_dir).exists()
    again = dataclasses.replace(spec, attempt=Attempt(2))
    train(again, STAGES["2-3"], connect=over_sockets(ends(tmp_path / "again", 2)))
    Run.of(spec).assert_equals(whole)
