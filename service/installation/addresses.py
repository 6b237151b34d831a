"""What an address to listen on, or to be asked from, means."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or an address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    address = address_of(host)
    return address is not None and address.is_loopback


def is_unspecified(host: str) -> bool:
    """Whether binding to an address means binding to all that the machine has."""
    address = address_of(host)
    return address is not None and address.is_unspecified


def same_address(one: str, other: str) -> bool:
    """Whether both are addresses, and the same."""
    return address_of(one) is not None and address_of(one) == address_of(other)


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
