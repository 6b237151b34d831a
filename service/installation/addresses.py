"""Properties of IP addresses and host names."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    address = address_of(host)
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1 is IPv4's loopback
    return address is not None and (mapped or address).is_loopback


def is_unspecified(host: str) -> bool:
    """Returns whether binding to an address binds to all addresses of the machine."""
    address = address_of(host)
    return address is not None and address.is_unspecified


def is_one_address(host: str) -> bool:
    """Returns whether it is an address of one machine that other machines could call it by."""
    address = address_of(host)
    # The interface of a scoped address ("fe80::1%eth0") has another name on each machine.
    return address is not None and not address.is_unspecified and getattr(address, "scope_id", None) is None


def same_address(one: str, other: str) -> bool:
    """Returns whether both are addresses and equal."""
    return address_of(one) is not None and address_of(one) == address_of(other)


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parses an address. Returns None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
