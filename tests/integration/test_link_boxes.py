"""The link between boxes of namespaces, whose network is cut without a word, as a broken switch does."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.boxes import link_box
from tests.support.boxes.network import Box, Direction, Network, network_or_skip
from tests.support.storage.links import Authority

pytestmark = pytest.mark.long
NAMES = ("left", "right")
NUM_KEYS = 25
WAIT_S = 90.0


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with network_or_skip(tmp_path, *NAMES) as network:
        authority = Authority(tmp_path)
        for name in NAMES:
            authority.certificates(name)
            network[name].shape(100e6)
        yield network


def start(network: Network, folder: Path, num_keys: int) -> "list[subprocess.Popen[bytes]]":
    return [
        network[name].start(
            sys.executable,
            link_box.__file__,
            *(name, peer, folder, network[name].address, network[peer].address, str(num_keys)),
            log="link.log",
        )
        for name, peer in (NAMES, NAMES[::-1])
    ]


def log_of(box: Box) -> str:
    return (box.folder / "link.log").read_text()


def await_line(box: Box, text: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while text not in log_of(box):
        assert time.monotonic() < until_s, log_of(box)
        time.sleep(0.02)


@pytest.mark.parametrize("direction", [Direction.BOTH, Direction.OUT])
def test_transfers_go_on_after_a_cut(network: Network, tmp_path: Path, direction: Direction) -> None:
    processes = start(network, tmp_path, num_keys=NUM_KEYS)
    await_line(network["right"], "pulled 5")
    network["left"].cut(direction)
    # Long enough that both sides give their connections up, and short enough that neither gives up the other.
    time.sleep(2 * link_box.SETTINGS.stall_s)
    network["left"].restore()
    for process in processes:
        process.wait(WAIT_S)
    for name in NAMES:
        text = log_of(network[name])
        assert text.splitlines()[:NUM_KEYS] == [f"pulled {number}" for number in range(NUM_KEYS)]
        assert "done after " in text
        assert "done after 1 connections" not in text


def test_box_that_was_switched_off_is_lost(network: Network, tmp_path: Path) -> None:
    left, _ = start(network, tmp_path, num_keys=10_000)
    await_line(network["left"], "pulled 5")
    network["right"].switch_off()
    left.wait(WAIT_S)
    assert "lost: box 'right' was silent for 1" in log_of(network["left"])
    assert "failed: box 'right' was silent for 1" in log_of(network["left"])
