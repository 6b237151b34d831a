"""Decides which of a device's buffers holds which contents, and which buffer is used for others.

Pure: the GPU worker, `windlass.offload` and the simulator drive the same class.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_Size = TypeVar("_Size", bound=Hashable)
_Contents = TypeVar("_Contents", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Acquired(Generic[_Contents]):
    """A buffer that has one more user."""

    buffer: int
    has_contents: bool  # they are in the buffer, or in flight to it for an earlier user
    evicted: _Contents | None = None  # the contents that the buffer held until now


class BlockBuffers(Generic[_Size, _Contents]):
    """A fixed number of equal buffers of each size. Buffers are named by their index in `sizes`. Not thread-safe.

    Several users of the same contents share a buffer. Contents stay after the release until the buffer is needed for
    others. The least recently released buffer is needed first, because its last use most likely has ended.
    """

    def __init__(self, numbers: Mapping[_Size, int]) -> None:
        """`numbers` has the number of buffers of each size."""
        self.sizes = tuple(size for size, number in numbers.items() for _ in range(number))
        self._contents: list[_Contents | None] = [None] * len(self.sizes)
        self._num_users = [0] * len(self.sizes)
        # The buffers of each size, the least recently released first. Those in use are at any place.
        self._by_release: dict[_Size, list[int]] = {size: [] for size in numbers}
        for buffer, size in enumerate(self.sizes):
            self._by_release[size].append(buffer)

    def acquire(
        self, size: _Size, contents: _Contents | None, keep: Collection[_Contents] = ()
    ) -> Acquired[_Contents] | None:
        """Acquires a buffer for contents. Returns None if all buffers are in use, or hold contents in `keep`.

        The caller fills the buffer if its contents are not there. `contents` is None if they must not be used again.
        """
        buffers = self._by_release.get(size, [])
        for buffer in buffers:
            if contents is not None and self._contents[buffer] == contents:
                self._num_users[buffer] += 1
                return Acquired(buffer, has_contents=True)
        idle = [buffer for buffer in buffers if not self._num_users[buffer]]
        empty = [buffer for buffer in idle if self._contents[buffer] is None]
        for buffer in empty or idle:
            evicted = self._contents[buffer]
            if evicted is None or evicted not in keep:
                self._contents[buffer], self._num_users[buffer] = contents, 1
                return Acquired(buffer, has_contents=False, evicted=evicted)
        return None

    def release(self, buffer: int) -> None:
        """Ends one user's use of a buffer."""
        assert self._num_users[buffer], "only a buffer in use is released"
        self._num_users[buffer] -= 1
        buffers = self._by_release[self.sizes[buffer]]
        buffers.remove(buffer)
        buffers.append(buffer)

    def drop(self, buffer: int) -> None:
        """Empties a buffer without users, because its contents become outdated."""
        assert not self._num_users[buffer], "a buffer in use is not emptied"
        self._contents[buffer] = None

    def contents(self, buffer: int) -> _Contents | None:
        """Returns what is in a buffer or in flight to it; None if nothing can be used again."""
        return self._contents[buffer]

    def num_users(self, buffer: int) -> int:
        """Returns the number of users of a buffer; 0 if it is idle."""
        return self._num_users[buffer]

    def check_invariants(self) -> None:
        """Asserts that each buffer is listed once, by its size, and that no contents are in two buffers of a size."""
        for size, buffers in self._by_release.items():
            assert sorted(buffers) == [buffer for buffer, its_size in enumerate(self.sizes) if its_size == size]
            held = [self._contents[buffer] for buffer in buffers if self._contents[buffer] is not None]
            assert len(set(held)) == len(held), "contents are in one buffer"
        assert all(number >= 0 for number in self._num_users)
