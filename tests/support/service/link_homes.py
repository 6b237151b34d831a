"""Homes with certificates for links, as those of boxes and of their head."""

from pathlib import Path

from windlass.service.cluster.authority.authority import Authority
from windlass.service.cluster.authority.link_certificate import LinkCertificate
from windlass.service.machine.fleet.link_endpoint import link_certificates
from windlass.storage.ids import BoxName


def give_link_certificate(home: Path, name: BoxName, authority: Authority) -> None:
    """Gives a home a certificate for links, under a name."""
    path = link_certificates(home).authority
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(authority.pem)
    LinkCertificate(home, name).renew(lambda request: authority.sign_link(request, name))
