"""Addresses that other machines cannot reach."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or an address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
