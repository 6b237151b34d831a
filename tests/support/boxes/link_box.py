"""One box of a link in a namespace: `link_box.py NAME PEER FOLDER ADDRESS PEER_ADDRESS NUM_KEYS`

It sends numbered keys to its peer, and pulls as many, with four slots each way. It prints a line for each event.
"""

import sys
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.support.storage.link_counts import count_links
from windlass.storage.ids import Attempt, BlockIndex, BoxName, JobId, Step
from windlass.storage.io_scheduler import IoResult
from windlass.storage.link import (
    Certificates,
    Identity,
    KeyKind,
    Link,
    LinkError,
    LinkKey,
    LinkSettings,
    PeerLost,
    listen,
)

PORT = 7500
KEY_NBYTES = 3_000_001
NUM_SLOTS = 4
SETTINGS = LinkSettings(heartbeat_s=0.3, stall_s=1.5, silence_s=10.0)


def content_of(box: str, number: int) -> bytes:
    """Returns the bytes of a key of a box."""
    word = f"{box} {number} ".encode()
    return (word * (KEY_NBYTES // len(word) + 1))[:KEY_NBYTES]


def main(name: str, peer: str, folder: str, address: str, peer_address: str, num_keys: str) -> None:
    """Runs one box."""
    files = Path(folder)
    counts = count_links(pytest.MonkeyPatch())
    link = Link.start(
        Identity(job=JobId("job"), attempt=Attempt(1), epoch=0, box=BoxName(name), secret=bytes(32)),
        listen(address, PORT),
        {BoxName(peer): (peer_address, PORT)},
        Certificates(certificate=files / f"{name}.pem", authority=files / "authority.pem"),
        settings=SETTINGS,
        on_lost=lambda box, error: print(f"lost: {error}", flush=True),
    )
    offers: deque[Future[IoResult]] = deque()
    pulls: deque[tuple[int, bytearray, Future[IoResult]]] = deque()
    to_pull = iter(range(int(num_keys)))
    try:
        for number in range(int(num_keys)):
            while len(pulls) < NUM_SLOTS and (wanted := next(to_pull, None)) is not None:
                slot = bytearray(KEY_NBYTES)
                pull = link.pull(_key(wanted), memoryview(slot), source=BoxName(peer), deadline_s=60.0)
                pulls.append((wanted, slot, pull))
            if len(offers) == NUM_SLOTS:
                offers.popleft().result()
            offers.append(link.offer(_key(number), memoryview(content_of(name, number)), {BoxName(peer)}))
            wanted, slot, pull = pulls.popleft()
            pull.result()
            assert slot == content_of(peer, wanted), f"key {wanted} is not what was sent"
            print(f"pulled {wanted}", flush=True)
        for offer in offers:
            offer.result()
    except PeerLost as error:
        print(f"failed: {error}", flush=True)
        link.close(0.0)
        return
    except LinkError as error:
        print(f"wrong: {error}", flush=True)
        raise
    print(f"done after {counts.num_connections[BoxName(peer)]} connections", flush=True)
    link.close()


def _key(number: int) -> LinkKey:
    return LinkKey(kind=KeyKind.ACTIVATION, step=Step(1), block=BlockIndex(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
