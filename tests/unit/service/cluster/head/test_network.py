"""The measurement of the network between a head and a box: the box is asked by answers to its calls."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import pytest

from tests.support.service.cluster_stage import Cluster
from tests.support.service.link_homes import give_link_certificate
from windlass.service.cluster.authority.authority import Authority
from windlass.service.cluster.head import network
from windlass.service.cluster.head.network import NetworkCheck, NetworkEnd, ProbeError, pairs_of
from windlass.service.machine.fleet import link_probe
from windlass.storage.link import LinkSettings
from windlass.storage.sql.repositories.boxes import HEAD_ID, BoxRepository

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_ENOUGH_S", 0.01)
    monkeypatch.setattr(link_probe, "_ROUND_S", 0.02)
    monkeypatch.setattr(link_probe, "_SETTINGS", settings(silence_s=8))


def settings(*, silence_s: float) -> LinkSettings:
    return LinkSettings(heartbeat_s=0.1, stall_s=0.5, silence_s=silence_s, connect_s=silence_s)


class Measured:
    """A head and a box that measure."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        settings = [stage.settings.model_copy(update={"link_host": HOST}) for stage in (cluster.head, cluster.box)]
        cluster.box.settings = settings[1]
        cluster.new_agent()
        self.head = NetworkEnd(id=HEAD_ID, name="head", host=HOST)
        self.box = NetworkEnd(id=cluster.row.id, name=cluster.row.name, host=HOST)
        authority = Authority.of(settings[0].home)
        give_link_certificate(settings[0].home, self.head.link_name, authority)
        give_link_certificate(settings[1].home, self.box.link_name, authority)
        self.check = NetworkCheck(settings[0], cluster.head.database)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Lets the box call its head meanwhile."""
        ending = threading.Event()

        def call() -> None:
            while not ending.wait(0.02):
                self.cluster.agent.tick()

        thread = threading.Thread(target=call)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def rates(self) -> dict[tuple[str, str], float]:
        with self.cluster.head.database.read() as session:
            rows = BoxRepository(session).rates(self.cluster.head.node)
            return {(row.source, row.target): row.bytes_per_s for row in rows}


@pytest.fixture
def measured(cluster: Cluster) -> Measured:
    return Measured(cluster)


def test_rates_of_head_and_box_are_measured_and_kept(measured: Measured) -> None:
    with measured.calling():
        first = measured.check.measure(measured.head, measured.box)
        assert measured.rates() == {
            (HEAD_ID, measured.box.id): first.there_bytes_per_s,
            (measured.box.id, HEAD_ID): first.back_bytes_per_s,
        }
        second = measured.check.measure(measured.box, measured.head)
    assert measured.rates()[measured.box.id, HEAD_ID] == second.there_bytes_per_s
    assert measured.cluster.box_row().probe is None


def test_rates_are_kept_for_the_way_that_the_bytes_go(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    # The box pulls from the head at 1 byte per second, and the head from the box at 2.
    monkeypatch.setattr(link_probe._Side, "_pull", lambda side: 1.0 if side._peer == "head" else 2.0)
    with measured.calling():
        rates = measured.check.measure(measured.head, measured.box)
    assert (rates.there_bytes_per_s, rates.back_bytes_per_s) == (1.0, 2.0)
    assert measured.rates() == {(HEAD_ID, measured.box.id): 1.0, (measured.box.id, HEAD_ID): 2.0}


def test_rates_of_a_removed_box_are_left_out(measured: Measured) -> None:
    with measured.calling():
        measured.check.measure(measured.head, measured.box)
    with measured.cluster.head.database.write() as session:
        BoxRepository(session).remove(measured.box.id, head=measured.cluster.head.node)
    assert measured.rates() == {}


def test_address_that_is_not_reached_is_told_with_what_to_do(measured: Measured) -> None:
    # Of the two, the box connects: its name comes first. The head listens at another address.
    with measured.calling(), pytest.raises(ProbeError) as caught:
        measured.check.measure(measured.box, replace(measured.head, host="127.0.0.2"))
    assert str(caught.value).startswith("box attic does not reach box head at 127.0.0.2 port ")
    for words in ("connection refused", "open link_ports of head to attic in the firewall", "set link_host of head"):
        assert words in str(caught.value)
    assert measured.rates() == {}


def test_box_without_an_address_is_told(measured: Measured) -> None:
    with pytest.raises(ProbeError, match="the address of box head is not known"):
        measured.check.measure(measured.box, replace(measured.head, host=None))


def test_box_that_does_not_call_ends_its_pair_only(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(network, "_ANSWER_S", 0.3)
        with pytest.raises(ProbeError, match=r"box attic did not answer within 0\.3 s"):
            measured.check.measure(measured.head, measured.box)
    with measured.calling():
        measured.check.measure(measured.head, measured.box)


def test_agent_that_restarts_meanwhile_ends_its_pair_only(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, is_leading = list[ProbeError](), threading.Event()

    def lead(side: link_probe._Side) -> NoReturn:
        is_leading.set()
        side._cancelled.wait(30)
        raise InterruptedError("it was given up")

    def measure() -> None:
        with pytest.raises(ProbeError) as caught:
            measured.check.measure(measured.head, measured.box)
        failed.append(caught.value)

    thread = threading.Thread(target=measure)
    with monkeypatch.context() as patch:
        patch.setattr(link_probe._Side, "lead", lead)
        patch.setattr(link_probe, "_SETTINGS", settings(silence_s=2))
        thread.start()
        while not is_leading.wait(0.02):
            measured.cluster.agent.tick()
        measured.cluster.agent.close()
        measured.cluster.new_agent()
    with measured.calling():
        thread.join(30)
        # The new agent says so with its next call, or the other side of the link notices it first.
        assert any(words in str(failed[0]) for words in ("started anew", "was silent"))
        measured.check.measure(measured.head, measured.box)


def test_two_measurements_at_once_are_refused(measured: Measured) -> None:
    with measured.cluster.head.database.write() as session:
        probe = {"id": "1", "name": "a", "peer": "b", "secret": "1" * 64, "seconds": 9, "expires_at": time.time() + 9}
        BoxRepository(session).ask_probe(measured.box.id, probe)
    with pytest.raises(ProbeError, match="is being measured already"):
        measured.check.measure(measured.head, measured.box)


def test_each_pair_is_measured_once() -> None:
    ends = [NetworkEnd(id=name, name=name, host=HOST) for name in "abc"]
    assert [(one.name, other.name) for one, other in pairs_of(ends)] == [("a", "b"), ("a", "c"), ("b", "c")]
