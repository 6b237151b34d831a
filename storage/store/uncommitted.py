"""What has been written on one SSD since its last commit: of which step each chunk's states are, or its gradient."""

from collections.abc import Sequence

from windlass.storage.ids import StateKind, Step
from windlass.storage.store.format import StoreGeometry
from windlass.storage.store.manifest import Manifest


class UncommittedMap(Manifest):
    """The map of the next commit. A chunk has one extent for as long, which a later step writes over in place.

    What the extent holds is labelled, in memory only, with its step: the states, or before them the gradient, that
    they are made from.
    """

    def __init__(self, geometry: StoreGeometry) -> None:
        super().__init__(geometry)
        self._labels: list[Step | None] = [None] * geometry.num_local_chunks
        self._gradient_nbytes: dict[int, int] = {}  # of the chunks whose extents hold a gradient

    def label(self, chunk: int) -> Step | None:
        """The step of what a chunk's extent holds; None if nothing has been written there."""
        return self._labels[chunk]

    def states_step(self, chunk: int) -> Step | None:
        """The step of a chunk's states; None if they have not been written since the last commit."""
        return None if chunk in self._gradient_nbytes else self._labels[chunk]

    def newest(self) -> Step | None:
        """The highest step of which anything has been written."""
        return max((label for label in self._labels if label is not None), default=None)

    def unlike(self, step: Step | None) -> int | None:
        """The first chunk whose states are not of `step`; None if all are."""
        return next((chunk for chunk in range(len(self._labels)) if self.states_step(chunk) != step), None)

    def nbytes(self, chunk: int, kind: StateKind) -> int:
        """Bytes of a state, or of the gradient, that have been asked to be written."""
        if kind is StateKind.GRAD:
            return self._gradient_nbytes.get(chunk, 0)
        return super().nbytes(chunk, kind)

    def begin(self, chunk: int, step: Step, sizes: Sequence[tuple[StateKind, int]]) -> None:
        """So many bytes of states, or of a gradient alone, are about to be written as `step` leaves them.

        What the extent held of another step is gone, in whole, and so is a gradient under states.
        """
        if self._labels[chunk] != step or chunk in self._gradient_nbytes:
            self.clear(chunk)
            self._gradient_nbytes.pop(chunk, None)
            self._labels[chunk] = step
        for kind, nbytes in sizes:
            if kind is StateKind.GRAD:
                self._gradient_nbytes[chunk] = nbytes
            else:
                self.expect(chunk, kind, nbytes)
