"""Refusals and admissions of callers by a head: real TLS on loopback."""

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update

from tests.support.service.boxes import HERE
from tests.support.service.cluster import Head, connection_with, joined, running_head
from windlass.service.cluster.authority.authority import Authority, make_box_request
from windlass.service.cluster.authority.codes import JoinCode
from windlass.service.cluster.box.connection import (
    BoxRemoved,
    HeadConnection,
    HeadRefused,
    HeadUnreachable,
    context_for,
)
from windlass.service.installation.home import node_of
from windlass.storage.sql.models import JoinCode as CodeRow
from windlass.storage.sql.repositories.boxes import BoxRepository, BoxState

_NO_ROUTE = "/v1/node/nothing"  # answered only to a box


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with running_head(tmp_path_factory.mktemp("head")) as head:
        yield head


@pytest.fixture(autouse=True)
def _without_boxes(head: Head) -> None:
    with head.database.write() as session:
        for box in BoxRepository(session).all(node_of(head.settings.home), with_removed=True):
            session.delete(box)


def _is_let_in(connection: HeadConnection) -> bool:
    with pytest.raises(HeadRefused) as refusal:
        connection.get(_NO_ROUTE)
    return refusal.value.status == 404


def _error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_join_with_a_code_lets_the_box_in(head: Head, tmp_path: Path) -> None:
    with joined(head, tmp_path, name="two") as connection:
        assert _is_let_in(connection)
    with head.database.read() as session:
        box = BoxRepository(session).by_name("two")
        assert box is not None
        assert (box.state, box.address, box.facts["torch"]) == ("ready", "127.0.0.1", HERE.torch)


def test_join_with_a_wrong_code_is_refused(head: Head) -> None:
    code = JoinCode.parse(head.new_code())
    wrong = JoinCode(bytes(32), code.fingerprint).text
    assert _error(head.ask_to_join(wrong)[0]) == (403, "the code is wrong; `windlass node code` on the head makes one")


def test_join_with_a_wrong_code_takes_no_lock_of_the_database(head: Head) -> None:
    wrong = JoinCode(bytes(32), JoinCode.parse(head.new_code()).fingerprint).text
    with head.database.write() as session:
        session.execute(update(CodeRow).values(used_at=None))
        began_s = time.monotonic()
        assert head.ask_to_join(wrong)[0].status_code == 403
        assert time.monotonic() - began_s < 4.0


def test_join_with_a_used_code_is_refused(head: Head) -> None:
    code = head.new_code()
    assert head.ask_to_join(code)[0].is_success
    status, message = _error(head.ask_to_join(code, name="other", node="node-" + "2" * 24)[0])
    assert status == 403
    assert "was used already" in message


def test_join_with_an_expired_code_is_refused(head: Head) -> None:
    code = head.new_code()
    with head.database.write() as session:
        session.execute(update(CodeRow).values(expires_at=time.time() - 1))
    status, message = _error(head.ask_to_join(code)[0])
    assert status == 403
    assert "has expired" in message


def test_join_with_another_version_is_refused_and_keeps_the_code(head: Head) -> None:
    code = head.new_code()
    old = HERE.model_copy(update={"windlass": "0.0.1", "torch": "2.1.9"})
    status, message = _error(head.ask_to_join(code, facts=old)[0])
    assert status == 409
    assert f"windlass 0.0.1, and the head has {HERE.windlass}; torch 2.1" in message
    assert head.ask_to_join(code)[0].is_success


def test_join_with_the_name_of_another_box_is_refused(head: Head) -> None:
    head.ask_to_join(head.new_code())
    for name in ("one", "head"):
        status, message = _error(head.ask_to_join(head.new_code(), name=name, node="node-" + "2" * 24)[0])
        assert status == 409
        assert f"there is a box {name} already" in message
    for name in ("3", "my box", "", "a" * 64):
        status, message = _error(head.ask_to_join(head.new_code(), name=name, node="node-" + "2" * 24)[0])
        assert status == 400
        assert "name: must begin with a letter or a digit" in message


def test_join_of_a_box_that_is_here_is_refused_and_of_one_that_was_removed_is_not(head: Head, tmp_path: Path) -> None:
    with joined(head, tmp_path) as connection:
        assert _error(head.ask_to_join(head.new_code())[0])[0] == 409
        with head.database.write() as session:
            box = BoxRepository(session).by_name("one")
            assert box is not None
            BoxRepository(session).set(box.id, state=BoxState.REMOVED.value)
        with joined(head, tmp_path, name="again") as second:
            assert _is_let_in(second)
        with pytest.raises(BoxRemoved):  # the old certificate
            connection.get(_NO_ROUTE)
    with head.database.read() as session:
        assert [each.name for each in BoxRepository(session).all(node_of(head.settings.home), with_removed=True)] == [
            "again"
        ]


def test_call_without_a_certificate_is_refused(head: Head) -> None:
    with head.client(Authority.of(head.settings.home).pem) as client:
        answer = client.post("/v1/node/sync", content=b"x" * 1000)
    assert _error(answer)[0] == 401
    assert "windlass node join" in _error(answer)[1]


def test_call_with_a_long_body_and_no_certificate_is_refused(head: Head) -> None:
    with head.client(Authority.of(head.settings.home).pem) as client:
        answer = client.post("/v1/node/join", content=b"x" * 100_000)
    assert answer.status_code == 413


def test_call_with_a_certificate_of_another_authority_is_refused(head: Head, tmp_path: Path) -> None:
    other = Authority.of(tmp_path)
    key, request = make_box_request()
    certificate, _ = other.sign_box(request, "one")
    trusted = Authority.of(head.settings.home).pem
    with (
        connection_with(head, tmp_path, key, certificate, trusted) as connection,
        pytest.raises(HeadUnreachable, match="does not accept this box's certificate"),
    ):
        connection.get(_NO_ROUTE)


def test_call_with_a_certificate_of_no_box_is_refused(head: Head, tmp_path: Path) -> None:
    authority = Authority.of(head.settings.home)
    key, request = make_box_request()
    certificate, _ = authority.sign_box(request, "one")
    with (
        connection_with(head, tmp_path, key, certificate, authority.pem) as connection,
        pytest.raises(BoxRemoved),
    ):
        connection.get(_NO_ROUTE)


def test_box_does_not_speak_to_a_head_of_another_authority(head: Head, tmp_path: Path) -> None:
    with (
        HeadConnection.to(head.url, context_for(Authority.of(tmp_path).pem)) as connection,
        pytest.raises(HeadUnreachable, match="is not the head that this box knows"),
    ):
        connection.get(_NO_ROUTE)


def test_box_does_not_take_another_box_for_its_head(tmp_path: Path) -> None:
    # A box's certificate is for clients only, so that TLS refuses it in a server.
    authority = Authority.of(tmp_path)
    key, request = make_box_request()
    certificate, _ = authority.sign_box(request, "head.windlass.internal")
    (tmp_path / "box.pem").write_bytes(key + certificate.encode())
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "box.pem")
    to_server, to_client, to_server_out, to_client_out = (ssl.MemoryBIO() for _ in range(4))
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    client = context_for(authority.pem).wrap_bio(to_client, to_server, server_hostname="head.windlass.internal")
    assert to_server_out.pending == to_client_out.pending == 0
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        server.do_handshake()
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        client.do_handshake()


def test_removed_box_is_out_at_its_next_request_on_an_open_connection(head: Head, tmp_path: Path) -> None:
    with joined(head, tmp_path) as connection:
        assert _is_let_in(connection)
        with head.database.write() as session:
            box = BoxRepository(session).by_name("one")
            assert box is not None
            BoxRepository(session).set(box.id, state=BoxState.REMOVED.value)
        with pytest.raises(BoxRemoved, match="box one was removed"):
            connection.get(_NO_ROUTE)


def test_wheel_is_sent_with_the_digest_that_the_authority_names(head: Head) -> None:
    with head.client(Authority.of(head.settings.home).pem) as client:
        info = client.get("/v1/node/ca").json()
        wheel = client.get("/v1/node/wheel")
    assert wheel.headers["X-Content-SHA256"] == info["wheel_sha256"]
    assert "windlass-" in wheel.headers["content-disposition"]
