"""Amounts of memory in words; error messages use no other form."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.amounts import GIB, bytes_text, describe_largest, least_gib, least_text, number_text

ROOT = Path(__file__).parents[2]
FLOORS = ("actors", "engine", "planner", "service", "storage")
# Errors that give an exact number of bytes on purpose. They report damaged files, records or slots, messages that break
# a protocol, or a defect of the caller, and not an amount of memory.
EXACT = {
    "actors/job/journal.py",
    "engine/data/dataset.py",
    "engine/optimizer/adam_kernel.py",
    "storage/link/transfers.py",
    "storage/link/wire/codec.py",
    "storage/link/wire/handshake.py",
    "storage/memory/arena.py",
    "storage/ssd/calibration.py",
    "storage/ssd/raw_device.py",
    "storage/integrity/records.py",
    "storage/store/decisions.py",
    "storage/store/scratch.py",
    "storage/store/format.py",
    "storage/store/tensor_store.py",
    "storage/io/engines.py",
}


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 bytes"),
        (100, "100 bytes"),
        (4096, "4.00 KiB"),
        (76743436, "73.19 MiB"),
        (GIB // 4, "0.25 GiB"),
        (24 * GIB + 10 * 2**20, "24.01 GiB"),
        (3 * 2**40, "3072.00 GiB"),
    ],
)
def test_bytes_text_uses_a_readable_unit(nbytes: int, words: str) -> None:
    assert bytes_text(nbytes) == words


@given(st.integers(1, 2**50))
def test_least_gib_as_a_budget_is_enough_and_hardly_more(nbytes: int) -> None:
    budget = float(least_gib(nbytes)) * GIB
    assert nbytes * (1 - 1e-12) <= budget <= 1.002 * nbytes


def test_largest_in_words_names_the_largest_first_and_nothing_that_is_0() -> None:
    assert describe_largest({"a": 2**20, "b": 0, "c": 2**30}) == "c 1.00 GiB, a 1.00 MiB"


def raw_counts(path: Path) -> list[str]:
    """The numbers of bytes that a module's messages contain unformatted; constants in capitals are small."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                told = ast.unparse(value.value)
                if str(text.value).startswith((" bytes", " B ")) and not told.isupper():
                    found.append(f"{path.name}:{node.lineno}: {told}")
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_messages_tell_no_raw_number_of_bytes(floor: str) -> None:
    paths = [path for path in (ROOT / floor).rglob("*.py") if str(path.relative_to(ROOT)) not in EXACT]
    assert [each for path in paths for each in raw_counts(path)] == []


def test_modules_with_exact_numbers_still_have_some() -> None:
    assert [name for name in sorted(EXACT) if not raw_counts(ROOT / name)] == []


def test_a_raw_number_of_bytes_is_found(tmp_path: Path) -> None:
    path = tmp_path / "told.py"
    path.write_text('f"the job needs {needed_nbytes} bytes"')
    assert raw_counts(path) == ["told.py:1: needed_nbytes"]


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(GIB, "1.00 GiB"), (GIB + 1, "1.01 GiB"), (2**20 * 90.001, "90.01 MiB"), (1.5, "2 bytes"), (0, "0 bytes")],
)
def test_amount_that_is_enough_is_rounded_up(nbytes: float, expected: str) -> None:
    assert least_text(nbytes) == expected


@pytest.mark.parametrize(
    ("value", "text"), [(17.64, "17.6"), (1543.2, "1540"), (0.5, "0.5"), (1.5e-5, "1.5e-05"), (0.0, "0")]
)
def test_large_numbers_have_no_exponent(value: float, text: str) -> None:
    assert number_text(value) == text
