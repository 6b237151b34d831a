"""A box's end of links: the head signs a certificate for the box alone, and the agent renews it."""

import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import delete

from tests.support.service.cluster import Head, running_head
from windlass.service.cluster import Versions
from windlass.service.cluster.authority import link_certificate
from windlass.service.cluster.authority.authority import make_box_request
from windlass.service.cluster.authority.codes import JoinCode
from windlass.service.cluster.authority.link_certificate import LinkCertificate
from windlass.service.cluster.box.connection import BoxRemoved, HeadConnection, Membership
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.cluster.box.join import HeadFacts, ask_to_join, forget_head
from windlass.service.cluster.box.link_upkeep import LinkUpkeep
from windlass.service.installation.link_host import link_host_of
from windlass.service.installation.settings import Settings
from windlass.service.machine.fleet.link_endpoint import link_files, link_name, link_name_of_head, reserve_link_port
from windlass.storage.ids import Attempt, BlockIndex, BoxName, JobId, Step
from windlass.storage.link import Certificates, Identity, KeyKind, Link, LinkKey, LinkSettings, PeerLost, listen
from windlass.storage.sql.models import Box
from windlass.storage.sql.repositories.boxes import BoxRepository

SETTINGS = LinkSettings(heartbeat_s=0.05, stall_s=0.5, silence_s=1.0, connect_s=1.0)
KEY = LinkKey(kind=KeyKind.PARAM, step=Step(1), block=BlockIndex(0))


class Joined:
    """A box that has joined a head."""

    def __init__(self, head: Head, home: Path, name: str) -> None:
        home.mkdir()
        authority = (head.settings.home / "cluster" / "authority.pem").read_text()
        facts = HeadFacts(url=head.url, authority=authority, versions=Versions.here(), wheel_sha256=None)
        self.home, self.now = home, 1000.0
        member: Membership = ask_to_join(Settings(home=home), facts, JoinCode.parse(head.new_code()), name)
        self.name, self.box_id = link_name(member.name, member.box_id), member.box_id
        self.connection = HeadConnection.of_box(home)
        self.link = HeadLink(self.connection)
        self.upkeep = LinkUpkeep(home, self.link, self.name, clock=lambda: self.now)

    def certificates(self) -> Certificates:
        found = link_files(self.home)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with running_head(tmp_path_factory.mktemp("head")) as head:
        yield head


@pytest.fixture
def attic(tmp_path: Path, head: Head) -> Iterator[Joined]:
    with head.database.write() as session:
        session.execute(delete(Box))
    attic = Joined(head, tmp_path / "attic", "attic")
    yield attic
    attic.connection.close()


def test_tend_gets_a_private_certificate_and_notes_the_address(attic: Joined, head: Head) -> None:
    assert (link_files(attic.home), link_host_of(Settings(home=attic.home))) == (None, None)
    attic.connection.get("/v1/node/self")
    attic.upkeep.tend()
    file = attic.certificates().certificate
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert LinkCertificate(attic.home, attic.name).is_fresh()
    assert link_host_of(Settings(home=attic.home)) == "127.0.0.1"
    assert link_files(head.settings.home) is not None


def test_tend_keeps_a_fresh_certificate_and_renews_an_old_one(attic: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    attic.upkeep.tend()
    first = attic.certificates().certificate.read_text()
    attic.now += 3600
    attic.upkeep.tend()
    assert attic.certificates().certificate.read_text() == first
    monkeypatch.setattr(link_certificate, "_RENEWED_BEFORE", 2 * link_certificate.LINK_LASTS)
    attic.upkeep.tend()  # it has just looked
    assert attic.certificates().certificate.read_text() == first
    attic.now += 3600
    attic.upkeep.tend()
    assert attic.certificates().certificate.read_text() != first


def test_tend_of_a_head_without_the_call_goes_on(attic: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.service.cluster.box.head_link._PREFIX", "/v0/node")
    attic.upkeep.tend()
    assert link_files(attic.home) is None
    monkeypatch.undo()
    attic.now += 3600
    attic.upkeep.tend()
    assert link_files(attic.home) is not None


def test_tend_of_a_removed_box_ends_it(attic: Joined, head: Head) -> None:
    with head.database.write() as session:
        BoxRepository(session).remove(attic.box_id, head="node-head")
    with pytest.raises(BoxRemoved):
        attic.upkeep.tend()


def test_renew_refuses_certificates_of_others(attic: Joined, head: Head) -> None:
    mine = LinkCertificate(attic.home, attic.name)
    with pytest.raises(ValueError, match="not that of box attic@"):
        LinkCertificate(attic.home, BoxName("attic@ffffffff")).renew(attic.link.sign_link)  # the head decides the name
    with pytest.raises(ValueError, match="for another key"):
        mine.renew(lambda _request: attic.link.sign_link(make_box_request()[1]))
    assert link_files(attic.home) is None


def test_certificate_of_a_name_is_not_used_for_the_next_box_of_that_name(
    attic: Joined, head: Head, tmp_path: Path
) -> None:
    attic.upkeep.tend()
    with head.database.write() as session:
        BoxRepository(session).set(attic.box_id, name="cellar")
    other = Joined(head, tmp_path / "other", "attic")
    other.connection.close()
    assert other.name != attic.name
    assert not LinkCertificate(attic.home, other.name).is_fresh()


def test_forgetting_the_head_removes_the_certificate(attic: Joined) -> None:
    attic.connection.get("/v1/node/self")
    attic.upkeep.tend()
    forget_head(attic.home)
    assert list((attic.home / "box").iterdir()) == []


def test_certificates_of_head_and_box_make_a_link_and_no_box_passes_for_another(
    attic: Joined, head: Head, tmp_path: Path
) -> None:
    cellar = Joined(head, tmp_path / "cellar", "cellar")
    for box in (attic, cellar):
        box.upkeep.tend()
    cellar.connection.close()
    files = link_files(head.settings.home)
    assert files is not None
    assert _meet((attic.name, attic.certificates()), (link_name_of_head(), files)) is None
    # One that connects as another, and one that answers as another. Both know the secret.
    assert isinstance(_meet((attic.name, cellar.certificates()), (link_name_of_head(), files)), PeerLost)
    assert isinstance(_meet((attic.name, attic.certificates()), (link_name_of_head(), cellar.certificates())), PeerLost)


def _meet(one: tuple[BoxName, Certificates], other: tuple[BoxName, Certificates]) -> Exception | None:
    """Pulls bytes from one box to the other. Returns why one of them lost the other; None if they arrived."""
    with ExitStack() as ending:
        reserved = {name: ending.enter_context(reserve_link_port("127.0.0.1", None)) for name, _ in (one, other)}
        addresses = {name: ("127.0.0.1", each.getsockname()[1]) for name, each in reserved.items()}
        links = []
        for (name, certificates), peer in ((one, other[0]), (other, one[0])):
            identity = Identity(job=JobId("ftjob-1"), attempt=Attempt(1), epoch=0, box=name, secret=bytes(32))
            peers = {peer: addresses[peer]}
            links.append(Link.start(identity, listen(*addresses[name]), peers, certificates, settings=SETTINGS))
            ending.callback(links[-1].close, 0.0)
        links[1].offer(KEY, memoryview(b"bytes"), {one[0]})
        into = bytearray(5)
        try:
            links[0].pull(KEY, memoryview(into), source=other[0]).result(timeout=20)
        except PeerLost as error:
            return error
        assert into == b"bytes"
        return None
