"""The certificate authority of a head: it signs the head's own certificate and those of the boxes."""

import hashlib
import ipaddress
import os
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from windlass.service.installation import SettingsError, is_one_address
from windlass.service.validation import ReportedError
from windlass.storage.files import sync_path, sync_tree
from windlass.storage.ids import BoxName
from windlass.storage.link import server_name

# The name of every head in its certificate. Boxes expect it, whatever address they reach the head by.
HEAD_SERVER_NAME = "head.windlass.internal"

_FOLDER = "cluster"  # in the home
_BACKDATED = timedelta(days=1)  # boxes' clocks may be behind
_AUTHORITY_LASTS = timedelta(days=30 * 365)
_BOX_LASTS = timedelta(days=20 * 365)  # a box is excluded by its row, not by its certificate's end
_SERVER_LASTS = timedelta(days=365)
LINK_LASTS = timedelta(days=30)  # each box renews its own in time
_RENEWED_BEFORE = timedelta(days=120)


class AuthorityError(ReportedError):
    """The authority's files cannot be read."""


@dataclass(frozen=True, slots=True)
class Authority:
    """The authority in a home. Its key never leaves the home, except in a backup of it."""

    home: Path
    certificate: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def of(cls, home: Path) -> Self:
        """Opens the authority of a home, and makes it if there is none. Raises AuthorityError."""
        folder = home / _FOLDER
        if not folder.exists():
            _make(folder)
        key_path = folder / "authority.key"
        try:
            if key_path.stat().st_mode & 0o077:
                raise AuthorityError(f"others may read {key_path}; run `chmod 600 {key_path}`")
            key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise AuthorityError(
                f"the authority in {folder} cannot be read ({error}); restore it from a backup, or move the folder "
                "away: then all boxes must join again"
            ) from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(home, certificate, key)

    @property
    def pem(self) -> str:
        """The authority's certificate."""
        return _pem_of(self.certificate)

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 of the authority's certificate."""
        return self.certificate.fingerprint(hashes.SHA256())

    def sign_box(self, request_pem: str, box_name: str) -> tuple[str, str]:
        """Signs a box's request. Returns its certificate as PEM, and the SHA-256 of the certificate in hex.

        Only the public key is taken from the request. Raises ValueError if it is no request for a key on P-256.
        """
        # It serves clients only, so that no box can take the head's place.
        certificate = self._sign(_builder(box_name, _key_of(request_pem), _BOX_LASTS), ExtendedKeyUsageOID.CLIENT_AUTH)
        return _pem_of(certificate), digest_of_certificate(certificate.public_bytes(serialization.Encoding.DER))

    def sign_link(self, request_pem: str, box_name: BoxName) -> str:
        """Signs the request for a certificate of a box's link, and returns it as PEM. Raises ValueError, as `sign_box`.

        It serves clients and servers, because boxes connect to each other. Its only name is that of the link, so
        neither a head nor a box's row goes by it.
        """
        name = server_name(box_name)
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        builder = _builder(name, _key_of(request_pem), LINK_LASTS).add_extension(names, critical=False)
        return _pem_of(self._sign(builder, ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH))

    def ensure_server_certificate(self, host: str) -> tuple[Path, Path]:
        """Returns the files of the head's own certificate and key. It is renewed in time, and for another address."""
        folder = self.home / _FOLDER
        # In one file, so that a certificate is never read with the key of another.
        path = folder / "server.pem"
        if not self._is_usable(path, host):
            key = ec.generate_private_key(ec.SECP256R1())
            names = [x509.DNSName(HEAD_SERVER_NAME), x509.DNSName("localhost")]
            addresses = dict.fromkeys(map(ipaddress.ip_address, (host, "127.0.0.1", "::1")))
            subject = x509.SubjectAlternativeName([*names, *(x509.IPAddress(address) for address in addresses)])
            builder = _builder(HEAD_SERVER_NAME, key.public_key(), _SERVER_LASTS).add_extension(subject, critical=False)
            certificate = self._sign(builder, ExtendedKeyUsageOID.SERVER_AUTH)
            _write_private(path, _private_pem(key) + _pem_of(certificate).encode())
        return path, path

    def _is_usable(self, path: Path, host: str) -> bool:
        try:
            text = path.read_text()
            certificate = x509.load_pem_x509_certificate(text[text.index("-----BEGIN CERT") :].encode())
            certificate.verify_directly_issued_by(self.certificate)
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            return False
        if ipaddress.ip_address(host) not in names.get_values_for_type(x509.IPAddress):
            return False
        return certificate.not_valid_after_utc - datetime.now(UTC) > _RENEWED_BEFORE

    def _sign(self, builder: x509.CertificateBuilder, *purposes: x509.ObjectIdentifier) -> x509.Certificate:
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            builder.issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _key_of(request_pem: str) -> ec.EllipticCurvePublicKey:
    try:
        request = x509.load_pem_x509_csr(request_pem.encode())
        key = request.public_key()
    except (ValueError, InvalidSignature, TypeError) as error:
        raise ValueError(f"must be a certificate request as PEM ({error})") from None
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
        raise ValueError("must be a request for a key on the curve P-256")
    if not request.is_signature_valid:
        raise ValueError("must be signed with its own key")
    return key


def digest_of_certificate(der: bytes) -> str:
    """Returns the SHA-256 of a certificate in hex, by which boxes are known."""
    return hashlib.sha256(der).hexdigest()


def make_box_request() -> tuple[bytes, str]:
    """Makes a box's private key, and the request for its certificate. Both are PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(_named("windlass box"))
    request = builder.sign(key, hashes.SHA256())
    return _private_pem(key), request.public_bytes(serialization.Encoding.PEM).decode()


def fingerprint_of(pem: str) -> bytes:
    """Returns the SHA-256 of a certificate. Raises ValueError."""
    return x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256())


def check_cluster_host(host: str) -> None:
    """Raises SettingsError unless boxes can reach this address."""
    if not is_one_address(host):
        raise SettingsError(
            f"cluster_host = {host!r}: must be one IP address of this machine that the other boxes reach, such as "
            "192.168.1.10"
        )


def _make(folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}-{secrets.token_hex(6)}.partial")
    partial.mkdir(mode=0o700)
    try:
        key = ec.generate_private_key(ec.SECP256R1())
        name = f"windlass head {secrets.token_hex(4)}"
        certificate = (
            _builder(name, key.public_key(), _AUTHORITY_LASTS)
            .issuer_name(_named(name))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write_private(partial / "authority.key", _private_pem(key))
        (partial / "authority.pem").write_text(_pem_of(certificate))
        sync_tree(partial)
        # Another process may have made one meanwhile, which then stays.
        with suppress(OSError):
            partial.rename(folder)
            sync_path(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _builder(common_name: str, key: ec.EllipticCurvePublicKey, lasts: timedelta) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(int(time.time()), UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(common_name))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lasts)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem_of(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())


def _write_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner may read, and that is there as a whole or not at all."""
    partial = path.with_name(f".{path.name}-{secrets.token_hex(6)}.partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_path(path.parent)
