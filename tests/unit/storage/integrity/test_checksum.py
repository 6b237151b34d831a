import random
import sys
import threading

import pytest
import xxhash

from windlass.storage.integrity.checksum import GRANULE_NBYTES, granule_digests


@pytest.mark.parametrize(
    ("nbytes", "num_granules"),
    [(0, 0), (1, 1), (4096, 1), (GRANULE_NBYTES, 1), (GRANULE_NBYTES + 4096, 2), (3 * GRANULE_NBYTES, 3)],
)
def test_one_digest_for_every_started_granule(nbytes: int, num_granules: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    expected = [
        xxhash.xxh3_64_intdigest(content[i * GRANULE_NBYTES : (i + 1) * GRANULE_NBYTES]) for i in range(num_granules)
    ]
    assert granule_digests(memoryview(content)) == expected


def test_digests_kept_on_a_disk_stay_valid() -> None:
    # Computed with xxHash 0.8.1 by another release of the binding: neither may change the digests.
    assert granule_digests(memoryview(bytes(4096))) == [0x93D76FE148C689BA]


@pytest.mark.parametrize("place", [0, 65535, 65536, GRANULE_NBYTES - 1])
def test_one_changed_bit_changes_the_digest_of_its_granule_only(place: int) -> None:
    content = bytearray(random.Random(0).randbytes(2 * GRANULE_NBYTES))
    before = granule_digests(memoryview(content))
    content[place] ^= 1
    after = granule_digests(memoryview(content))
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_digests_fit_64_unsigned_bits() -> None:
    digests = [granule_digests(memoryview(bytes([i])))[0] for i in range(64)]
    assert all(0 <= digest < 1 << 64 for digest in digests)
    assert max(digests) >= 1 << 63


def test_checksum_keeps_gil_unless_a_thread_has_waited_for_it() -> None:
    """Otherwise each granule would wait for a busy thread to release the GIL: 5 ms, a hundred times the checksum."""
    go = threading.Lock()  # a plain lock: releasing it lets no other thread run
    go.acquire()
    ran = threading.Event()

    def run() -> None:
        with go:
            ran.set()

    other = threading.Thread(target=run)
    other.start()
    content = memoryview(bytes(32 * GRANULE_NBYTES))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)  # no thread is forced to release the GIL
    try:
        go.release()
        granule_digests(content)
        ran_meanwhile = ran.is_set()
    finally:
        sys.setswitchinterval(interval_s)
    other.join()
    assert not ran_meanwhile
