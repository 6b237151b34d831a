"""A tensor store that a test reads and writes in its own thread, without an SSD server."""

from windlass.storage.ids import Attempt, ChunkKey, StateKind, Step
from windlass.storage.store.regions import GRANULE_NBYTES, StateRegion
from windlass.storage.store.tensor_store import TensorStore


class DirectStore(TensorStore):
    """Adds plain reads and writes to the store that the product drives through SSD servers.

    Its commits are decided at once, as those of a job with one SSD. `prepare` only commits on this SSD.
    """

    def commit(self, step: Step, attempt: Attempt, trainer_state: str, *, states_step: Step | None = None) -> None:
        """Commits a step and decides it."""
        self.prepare(step, attempt, trainer_state, states_step=states_step)
        self.decide(step)

    def prepare(self, step: Step, attempt: Attempt, trainer_state: str, *, states_step: Step | None = None) -> None:
        """Commits a step on this SSD, undecided."""
        super().commit(step, attempt, trainer_state, states_step=states_step)

    def read(self, key: ChunkKey, kind: StateKind, step: Step, buffer: memoryview) -> None:
        """Fills `buffer` with the first bytes of a state as `step` left it, and verifies them."""
        (region,) = self.regions_to_read(key, step, [(kind, buffer.nbytes)])
        for start in range(0, buffer.nbytes, GRANULE_NBYTES):
            part = buffer[start : start + GRANULE_NBYTES]
            self._transfer("read", region, start, part)
            region.verify(start, part)

    def write(self, key: ChunkKey, kind: StateKind, step: Step, buffer: memoryview) -> None:
        """Writes the first bytes of a state as `step` leaves it. They are safe once the step is committed."""
        (region,) = self.regions_to_write(key, step, [(kind, buffer.nbytes)])
        for start in range(0, buffer.nbytes, GRANULE_NBYTES):
            part = buffer[start : start + GRANULE_NBYTES]
            self._transfer("write", region, start, part)
            region.note_written(start, part)

    def _transfer(self, verb: str, region: StateRegion, start: int, buffer: memoryview) -> None:
        move = self.volume.device.read if verb == "read" else self.volume.device.write
        done = 0
        while done < buffer.nbytes:
            offset = region.offset + start + done
            try:
                moved = move(offset, buffer[done:])
            except OSError as error:
                raise region.io_error(verb, error) from error
            if moved == 0:
                raise region.io_error(verb, EOFError(f"the SSD ends at byte {offset}"))
            done += moved
