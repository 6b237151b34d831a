"""The writes on one SSD since its last commit, with the step of each chunk's states or gradient."""

from collections.abc import Sequence

from windlass.storage.ids import StateKind, Step
from windlass.storage.store.format import StoreGeometry
from windlass.storage.store.manifest import Manifest


class UncommittedMap(Manifest):
    """The manifest of the next commit. Until then a chunk has one extent, which later steps overwrite in place.

    A label in memory holds the step of the extent's contents: the states, or before them the gradient.
    """

    def __init__(self, geometry: StoreGeometry) -> None:
        super().__init__(geometry)
        self._labels: list[Step | None] = [None] * geometry.num_local_chunks
        self._gradient_nbytes: dict[int, int] = {}  # for chunks whose extents hold a gradient

    def label(self, chunk: int) -> Step | None:
        """Returns the step of a chunk's extent, None if nothing has been written there."""
        return self._labels[chunk]

    def states_step(self, chunk: int) -> Step | None:
        """Returns the step of a chunk's states, None if they have not been written since the last commit."""
        return None if chunk in self._gradient_nbytes else self._labels[chunk]

    def newest(self) -> Step | None:
        """Returns the highest step with a write, None if there is none."""
        return max((label for label in self._labels if label is not None), default=None)

    def unlike(self, step: Step | None) -> int | None:
        """Returns the first chunk whose states are not of `step`, None if all are."""
        return next((chunk for chunk in range(len(self._labels)) if self.states_step(chunk) != step), None)

    def nbytes(self, chunk: int, kind: StateKind) -> int:
        """Returns the announced bytes of a state or of the gradient."""
        if kind is StateKind.GRAD:
            return self._gradient_nbytes.get(chunk, 0)
        return super().nbytes(chunk, kind)

    def begin(self, chunk: int, step: Step, sizes: Sequence[tuple[StateKind, int]]) -> None:
        """Announces the writing of a step's states, or of its gradient alone, with their bytes.

        All contents of another step are lost. States also replace a gradient of the same step.
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
