"""Certificates for tests of TLS."""

import ssl

import pytest
import trustme


@pytest.fixture(scope="package")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="package")
def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    return context
