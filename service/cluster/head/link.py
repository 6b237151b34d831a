"""The route by which boxes get their certificates for links to other boxes."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from windlass.service.cluster.authority import Authority
from windlass.service.cluster.head.caller import BoxDep
from windlass.service.installation import Settings
from windlass.service.machine.fleet import link_name
from windlass.service.validation import ApiError


class LinkRequest(BaseModel):
    """A box's request for a certificate."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    request: Annotated[str, Field(max_length=8192)]  # as PEM


class LinkReply(BaseModel):
    """The certificate, which lasts 30 days, and the name in it."""

    certificate: str  # as PEM
    authority: str  # the certificate of the authority that signed it
    name: str


def link_router(settings: Settings) -> APIRouter:
    """Makes the route."""
    router = APIRouter(prefix="/v1/node")

    @router.post("/link")
    def sign_link(body: LinkRequest, box: BoxDep) -> LinkReply:
        """Signs a certificate for the calling box, whatever name it asks for."""
        authority, name = Authority.of(settings.home), link_name(box.name, box.id)
        try:
            certificate = authority.sign_link(body.request, name)
        except ValueError as error:
            raise ApiError(f"request: {error}", param="request", code="invalid_value") from None
        return LinkReply(certificate=certificate, authority=authority.pem, name=name)

    return router
