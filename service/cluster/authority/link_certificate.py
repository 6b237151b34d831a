"""The certificate of a box for links to other boxes: made, kept in its home, and renewed in time."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from windlass.service.cluster.authority.authority import LINK_LASTS, Authority, make_box_request
from windlass.service.machine.fleet import link_certificates, link_name_of_head
from windlass.storage.files import write_durably
from windlass.storage.ids import BoxName
from windlass.storage.link import server_name

# Time before its end at which a certificate is renewed. It is most of its time, because a link reads it only when it
# starts, and needs it for new connections as long as it works.
_RENEWED_BEFORE = LINK_LASTS * 2 / 3


@dataclass(frozen=True, slots=True)
class LinkCertificate:
    """The files of a box's certificate for links. Processes of the home get them from `link_files`.

    `name`: see `link_name`.
    """

    home: Path
    name: BoxName

    def is_fresh(self) -> bool:
        """Returns whether the certificate is there, for this name, of the authority, and far from its end."""
        try:
            text = link_certificates(self.home).certificate.read_text()
            certificate = x509.load_pem_x509_certificate(text[text.index("-----BEGIN CERT") :].encode())
            self._check(certificate)
        except (OSError, ValueError):
            return False
        return certificate.not_valid_after_utc - datetime.now(UTC) > _RENEWED_BEFORE

    def renew(self, sign: Callable[[str], str]) -> None:
        """Makes a key, has a certificate for it signed, and stores both in one file, so that they always match.

        `sign` gets a request and returns the certificate, both PEM. Its errors pass.

        Raises:
            ValueError: what was signed is no certificate for this key and name, or is of another authority.
            OSError: it cannot be stored.
        """
        key, request = make_box_request()
        pem = sign(request)
        certificate = x509.load_pem_x509_certificate(pem.encode())
        self._check(certificate)
        mine = serialization.load_pem_private_key(key, password=None).public_key()
        if certificate.public_key() != mine:
            raise ValueError("the certificate is for another key")
        write_durably(link_certificates(self.home).certificate, key.decode() + pem, mode=0o600)

    def _check(self, certificate: x509.Certificate) -> None:
        """Raises ValueError unless a certificate has this name and is of the authority that the home knows."""
        try:
            authority = link_certificates(self.home).authority.read_bytes()
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (OSError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
            raise ValueError(f"the certificate is not of the authority that this home knows ({error})") from error
        if server_name(self.name) not in names.get_values_for_type(x509.DNSName):
            raise ValueError(f"the certificate is not that of box {self.name}")


def ensure_link_of_head(authority: Authority) -> None:
    """Makes or renews the head's own certificate for links. Raises OSError."""
    certificate = LinkCertificate(authority.home, link_name_of_head())
    if not certificate.is_fresh():
        certificate.renew(lambda request: authority.sign_link(request, certificate.name))
