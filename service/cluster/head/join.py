"""The routes by which a box joins. They need no certificate, because the box has none yet."""

import re
import time
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from windlass.service.cluster import Versions
from windlass.service.cluster.authority import Authority, JoinCode, digest_of_wheel, ensure_wheel
from windlass.service.cluster.head.caller import BoxDep
from windlass.service.installation import Settings, node_of
from windlass.service.machine.fleet import BoxFacts
from windlass.service.validation import ApiError
from windlass.storage.ids import HEAD_NAME
from windlass.storage.sql import Box, Database
from windlass.storage.sql.repositories import (
    BoxRepository,
    BoxState,
    is_away,
)

DIGEST_HEADER = "X-Content-SHA256"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62})"
_NODE = r"node-[0-9a-f]{24}"


def _check_name(name: str) -> str:
    """Returns the name of a box. Raises ValueError if it is none."""
    if not re.fullmatch(_NAME, name) or name.isdecimal():
        raise ValueError(
            "must begin with a letter or a digit, and have at most 63 letters, digits, dots, dashes and underscores; a "
            "number is no name, because --boxes takes both"
        )
    return name


class JoinRequest(BaseModel):
    """A box's request to join."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    secret: Annotated[str, Field(min_length=64, max_length=64, pattern="^[0-9a-f]+$")]  # of the code, in hex
    request: Annotated[str, Field(max_length=8192)]  # for a certificate, as PEM
    name: Annotated[str, AfterValidator(_check_name)]
    node: Annotated[str, Field(pattern=f"^{_NODE}$")]
    facts: BoxFacts


class JoinReply(BaseModel):
    """The head's answer to a box that has joined."""

    box_id: str
    name: str
    certificate: str
    authority: str


class BoxSelf(BaseModel):
    """The head's view of the calling box."""

    name: str
    state: str
    has_reported: bool  # since it joined


class HeadInfo(BaseModel):
    """The head's authority and its versions. A box checks the authority's fingerprint by its code."""

    authority: str
    versions: Versions
    wheel_sha256: str | None  # None: the head cannot make a wheel


def join_router(settings: Settings, database: Database) -> APIRouter:
    """Makes the routes."""
    router = APIRouter(prefix="/v1/node")

    @router.get("/ca")
    def read_authority() -> HeadInfo:
        """Returns the authority's certificate, which is no secret."""
        try:
            wheel = digest_of_wheel(ensure_wheel(settings.home))
        except (OSError, RuntimeError):
            wheel = None
        return HeadInfo(authority=Authority.of(settings.home).pem, versions=Versions.here(), wheel_sha256=wheel)

    @router.get("/wheel")
    def fetch_wheel() -> Response:
        """Sends the head's own version of windlass."""
        path = ensure_wheel(settings.home)
        headers = {DIGEST_HEADER: digest_of_wheel(path)}
        return FileResponse(path, filename=path.name, media_type="application/octet-stream", headers=headers)

    @router.post("/join")
    def join(body: JoinRequest, request: Request) -> JoinReply:
        """Makes a box of the caller."""
        authority, code = Authority.of(settings.home), JoinCode(bytes.fromhex(body.secret), b"")
        address = "" if request.client is None else request.client.host
        with database.read() as session:  # so that a caller without a code takes no lock that others wait for
            _check_code(session, code)
        with database.write() as session:
            boxes = BoxRepository(session)
            _check_code(session, code)
            _check_versions(body.facts)
            try:
                certificate, digest = authority.sign_box(body.request, body.name)
            except ValueError as error:
                raise ApiError(f"request: {error}", param="request", code="invalid_value") from None
            box = _add_box(session, settings, body, certificate=digest, address=address)
            if not boxes.use_code(code.digest, box.id):
                raise ApiError("the code was used meanwhile", status=403, code="code")
            return JoinReply(box_id=box.id, name=box.name, certificate=certificate, authority=authority.pem)

    @router.get("/self")
    def read_self(box: BoxDep) -> BoxSelf:
        """Tells a box what the head knows of it."""
        return BoxSelf(name=box.name, state=box.state, has_reported=box.seen_at > box.joined_at)

    @router.post("/leave", status_code=204)
    def leave(box: BoxDep) -> None:
        """Removes the calling box, as `windlass node remove` does."""
        with database.write() as session:
            BoxRepository(session).remove(box.id, head=node_of(settings.home))

    return router


def _check_code(session: Session, code: JoinCode) -> None:
    if (why := BoxRepository(session).why_code_is_invalid(code.digest)) is not None:
        raise ApiError(f"the code {why}; `windlass node code` on the head makes one", status=403, code="code")


def _check_versions(facts: BoxFacts) -> None:
    box = Versions(windlass=facts.windlass, torch=facts.torch, ray=facts.ray)
    if differences := box.differences(Versions.here()):
        message = f"all boxes of a service need the same versions; this box has {'; '.join(differences)}"
        raise ApiError(message, status=409, code="version_differs")


def _add_box(session: Session, settings: Settings, body: JoinRequest, *, certificate: str, address: str) -> Box:
    """Adds the box, or gives a known home its new certificate. Raises ApiError."""
    boxes = BoxRepository(session)
    if body.node == node_of(settings.home) or (boxes.by_node(body.node) is None and boxes.is_home(body.node)):
        raise ApiError("this home is a service's own; choose another home for a box", status=409, code="box_is_head")
    known = boxes.by_node(body.node)
    is_joined = known is not None and known.state != BoxState.REMOVED.value
    if known is not None and is_joined and not is_away(known):
        message = f"this home is that of box {known.name}, which is here; `windlass node leave` ends that first"
        raise ApiError(message, status=409, code="box_is_here")
    named = boxes.by_name(body.name)
    if body.name == HEAD_NAME or (named is not None and (known is None or named.id != known.id)):
        removed = ", which was removed" if named is not None and named.state == BoxState.REMOVED.value else ""
        message = f"there is a box {body.name} already{removed}; choose another name with --name"
        raise ApiError(message, status=409, code="name_taken")
    facts = body.facts.model_dump(mode="json")
    if known is None:
        here = node_of(settings.home)
        return boxes.add(
            name=body.name, node=body.node, head=here, certificate=certificate, address=address, facts=facts
        )
    # A box that was not removed stays draining if it was: joining again renews its certificate only.
    now_s = time.time()
    given = {"name": body.name, "certificate": certificate, "address": address, "facts": facts}
    if not is_joined:
        boxes.set_state(known.id, BoxState.READY)
    boxes.set(known.id, **given, joined_at=now_s, seen_at=now_s)
    return boxes.get(known.id)
