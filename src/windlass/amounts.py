"""Formats amounts of memory, and other numbers, for errors, events and tables, so that all of them look alike."""

import math
from collections.abc import Mapping

GIB = 2**30
GB = 10**9
# Units with their size, and the smallest amount that is shown in each.
_UNITS = (
    ("PiB", 2**50, 10 * 2**50),
    ("TiB", 2**40, 10 * 2**40),
    ("GiB", GIB, GIB / 10),
    ("MiB", 2**20, 2**20 / 10),
    ("KiB", 2**10, 2**10),
)


def bytes_text(nbytes: float) -> str:
    """Formats an amount with two decimals: "1.50 GiB".

    KiB are used from 1 on, MiB and GiB from 0.1, TiB and PiB from 10. So most amounts in a sentence have the same unit.
    """
    for unit, size, least_nbytes in _UNITS:
        if abs(nbytes) >= least_nbytes:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"


def least_text(nbytes: float) -> str:
    """Formats an amount as `bytes_text`, rounded up: so much is enough where `nbytes` are needed."""
    for _, size, least_nbytes in _UNITS:
        if nbytes >= least_nbytes:
            return bytes_text(math.ceil(nbytes * 100 / size) * size / 100)
    return bytes_text(math.ceil(nbytes))


def describe_largest(parts: Mapping[str, float], *, most: int = 4) -> str:
    """Lists the largest parts of an amount by name, the largest first, without those that are 0."""
    named = sorted(((nbytes, name) for name, nbytes in parts.items() if nbytes), reverse=True)
    return ", ".join(f"{name} {bytes_text(nbytes)}" for nbytes, name in named[:most])


def least_gib(nbytes: float) -> str:
    """Returns the smallest number of GiB, with four digits, that is at least `nbytes` (> 0). Use it for budgets."""
    gib = nbytes / GIB
    num_decimals = max(0, 4 - math.ceil(math.log10(gib)))
    scale = 10**num_decimals
    told = f"{math.ceil(gib * scale) / scale:.{num_decimals}f}"
    return told.rstrip("0").rstrip(".") if num_decimals else told


def number_text(value: float, num_digits: int = 3) -> str:
    """Formats a number with so many significant digits, large ones without an exponent: "17.6", "1540"."""
    told = f"{value:.{num_digits}g}"
    return f"{float(told):.0f}" if "e+" in told else told
