"""Decides which chunks are copied together between host memory and the device.

A batch has one pair of events and one callback. They take the host tens of microseconds, however small the copies are.
The simulator copies chunk by chunk, and gets the same times. The copies of a batch follow each other on the link, and
only the release of their slots waits for the last one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

# Bytes of a batch, unless a single chunk is larger. They take a link some milliseconds, for which slots stay in use.
COPY_BATCH_NBYTES = 64 << 20

_Chunk = TypeVar("_Chunk")


def copy_batch_size(ready: Iterable[tuple[object, int]]) -> int:
    """Returns how many of the chunks that are ready form the next batch: at least one, if there are any.

    `ready` has the owner and the bytes of each chunk, in the order of their copies. A batch has chunks of one owner.
    """
    first: object = None
    size = nbytes = 0
    for owner, chunk_nbytes in ready:
        nbytes += chunk_nbytes
        if size and (owner is not first or nbytes > COPY_BATCH_NBYTES):
            break
        first = owner
        size += 1
    return size


def batches_to_copy(chunks: Sequence[_Chunk], nbytes_of: Callable[[_Chunk], int]) -> Iterator[Sequence[_Chunk]]:
    """Yields the batches of chunks that have one owner and are all ready."""
    start = 0
    while start < len(chunks):
        stop = start + copy_batch_size((None, nbytes_of(chunk)) for chunk in chunks[start:])
        yield chunks[start:stop]
        start = stop
