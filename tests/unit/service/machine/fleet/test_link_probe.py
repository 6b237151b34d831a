"""Measurements of the network between two boxes, both of which are in this process."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.service.link_homes import give_link_certificate
from windlass.service.cluster.authority.authority import Authority
from windlass.service.installation.settings import Settings
from windlass.service.machine.fleet import link_probe
from windlass.service.machine.fleet.link_endpoint import reserve_link_port
from windlass.service.machine.fleet.link_probe import LinkProbe
from windlass.service.machine.fleet.messages import ProbeAnswer, ProbeAsk
from windlass.storage.ids import BoxName
from windlass.storage.link import LinkSettings

HOST = "127.0.0.1"
Begin = Callable[..., LinkProbe]


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr(link_probe, "_ENOUGH_S", 0.02)
    monkeypatch.setattr(link_probe, "_ROUND_S", 0.04)
    monkeypatch.setattr(
        link_probe, "_SETTINGS", LinkSettings(heartbeat_s=0.05, stall_s=0.5, silence_s=1.0, connect_s=1.0)
    )
    (tmp_path / "a").mkdir()
    authority = Authority.of(tmp_path / "a")
    for name in ("a", "b"):
        give_link_certificate(tmp_path / name, BoxName(name), authority)
    return {name: tmp_path / name for name in ("a", "b")}


@pytest.fixture
def begin(homes: dict[str, Path]) -> Iterator[Begin]:
    with ExitStack() as ending:

        def begin(
            name: str, peer: str, *, secret: str = "1" * 64, seconds: float = 30.0, **address: object
        ) -> LinkProbe:
            ask = ProbeAsk(id="one", name=name, peer=peer, secret=secret, seconds=seconds, **address)  # type: ignore
            probe = LinkProbe(Settings(home=homes[name], link_host=HOST), ask)
            ending.callback(probe.join, 30.0)
            ending.callback(probe.cancel)
            return probe

        yield begin


def until(probe: LinkProbe, is_so: Callable[[ProbeAnswer], object]) -> ProbeAnswer:
    deadline = time.monotonic() + 30
    while not is_so(answer := probe.answer()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.01)
    return answer


def test_two_boxes_measure_both_ways(begin: Begin) -> None:
    listens = begin("b", "a")
    port = until(listens, lambda answer: answer.port).port
    connects = begin("a", "b", peer_host=HOST, peer_port=port)
    result = until(connects, lambda answer: answer.result or answer.error).result
    assert result is not None
    assert result.received_bytes_per_s > 1e6
    assert result.sent_bytes_per_s > 1e6
    assert 0 < result.round_trip_s < 1
    assert listens.join(30)
    assert listens.answer().error is None


def test_rate_is_that_of_all_bytes_of_the_last_round(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_MOST_NBYTES", link_probe._FIRST_NBYTES)
    pulled = []
    pull = link_probe._Side._pull

    def timed(side: link_probe._Side) -> float:
        start_s = time.monotonic()
        rate = pull(side)
        pulled.append(rate * (time.monotonic() - start_s) / link_probe._FIRST_NBYTES)
        return rate

    monkeypatch.setattr(link_probe._Side, "_pull", timed)
    listens = begin("b", "a")
    connects = begin("a", "b", peer_host=HOST, peer_port=until(listens, lambda answer: answer.port).port)
    until(connects, lambda answer: answer.result)
    assert len(pulled) == 2
    assert all(part >= 1 for part in pulled)  # the rate leaves out the time before and after


def test_port_that_is_closed_is_told_as_unreachable(begin: Begin) -> None:
    with reserve_link_port(HOST, None) as reserved:
        answer = until(begin("a", "b", peer_host=HOST, peer_port=reserved.getsockname()[1]), lambda each: each.error)
    assert (answer.error, answer.is_unreachable) == ("connection refused", True)


def test_another_secret_is_refused(begin: Begin) -> None:
    port = until(listens := begin("b", "a"), lambda answer: answer.port).port
    answer = until(begin("a", "b", secret="2" * 64, peer_host=HOST, peer_port=port), lambda each: each.error)
    assert "its secret is not that of this attempt" in (answer.error or "")
    assert not answer.is_unreachable
    assert listens.answer().error is None  # another one may still come


def test_home_without_a_certificate_says_so(begin: Begin, homes: dict[str, Path]) -> None:
    (homes["b"] / "cluster" / "link.pem").unlink()
    assert "no certificate" in (until(begin("b", "a"), lambda answer: answer.error).error or "")


def test_probe_ends_by_itself_and_when_it_is_cancelled(begin: Begin) -> None:
    late, cancelled = begin("b", "a", seconds=0.1), begin("b", "a")
    assert "took too long" in (until(late, lambda answer: answer.error).error or "")
    until(cancelled, lambda answer: answer.port)
    cancelled.cancel()
    assert cancelled.join(30)
    assert cancelled.answer().error == "the measurement was given up"
