"""A store, compared with a plain model of its content, through any writes, commits and restarts."""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.storage.stores import FP32, JOB, keys, make_geometry, new_store, open_volume, page_aligned, resume
from windlass.storage.ids import ChunkKey, StateKind, Step
from windlass.storage.integrity.errors import StepNotAllowed

GEOMETRY = make_geometry(JOB, formats=FP32, chunks_per_block=(1, 1))
KEYS, KINDS = keys(GEOMETRY), GEOMETRY.kinds
NBYTES = GEOMETRY.region_nbytes(StateKind.MASTER)  # of every state, and of the gradients here

Held = dict[tuple[ChunkKey, StateKind], int]  # by the seed of its bytes


def _bytes(seed: int) -> memoryview:
    return page_aligned(random.Random(seed).randbytes(NBYTES))


class _Model:
    def __init__(self, directory: Path) -> None:
        self.volume = open_volume(directory)
        self.store = new_store(self.volume, GEOMETRY)
        self.attempt = 1
        self.num_written = 0
        self.step: int | None = None  # the committed step
        self.committed: Held = {}
        self.working: Held = {}
        self.labels: dict[ChunkKey, int] = {}

    def write(self, key: ChunkKey, kinds: list[StateKind], step: int) -> None:
        """Writes states, or only the gradient."""
        label, held = self.labels.get(key, -1), {kind for each, kind in self.working if each == key}
        is_allowed = step > (-1 if self.step is None else self.step) and step >= label
        is_gradient = StateKind.GRAD in kinds
        is_allowed &= not (is_gradient and held & {*KINDS})
        seeds = {kind: self.num_written + i for i, kind in enumerate(kinds, 1)}
        self.num_written += len(kinds)
        if not self._try(is_allowed, lambda: self._put(key, step, seeds)):
            return
        if label != step or StateKind.GRAD in held:
            self.working = {place: seed for place, seed in self.working.items() if place[0] != key}
        self.labels[key] = step
        self.working |= {(key, kind): seed for kind, seed in seeds.items()}

    def fill(self, step: int) -> None:
        for key in KEYS:
            self.write(key, list(KINDS), step)

    def commit(self, step: int, states_step: int) -> None:
        places = {(key, kind) for key in KEYS for kind in KINDS}
        states = {place: seed for place, seed in self.working.items() if place in places}
        is_allowed = step > (-1 if self.step is None else self.step) and step >= max(self.labels.values(), default=0)
        if states_step == self.step:
            is_allowed, states = is_allowed and not states, self.committed
        else:
            is_allowed &= {*states} == places and {*self.labels.values()} == {states_step}
        if self._try(is_allowed, lambda: self._commit(step, states_step)):
            self.step, self.committed, self.working, self.labels = step, states, {}, {}

    def reopen(self) -> None:
        self.attempt += 1
        self.store = resume(self.volume, self.attempt)
        self.working, self.labels = {}, {}

    def check(self) -> None:
        """Checks that all held data can be read, and nothing else."""
        first = 0 if self.step is None else self.step
        for step in range(max(0, first - 2), first + 5):
            for place in [(key, kind) for key in KEYS for kind in (*KINDS, StateKind.GRAD)]:
                if self.labels.get(place[0]) == step:
                    seed = self.working.get(place)
                else:
                    seed = self.committed.get(place) if step == self.step else None
                found = page_aligned(bytes(NBYTES))
                if self._try(seed is not None, lambda: self.store.read(*place, Step(step), found)):  # noqa: B023
                    assert seed is not None
                    assert found == _bytes(seed), (place, step)

    def _put(self, key: ChunkKey, step: int, seeds: dict[StateKind, int]) -> None:
        regions = self.store.regions_to_write(key, Step(step), [(kind, NBYTES) for kind in seeds])
        for region, seed in zip(regions, seeds.values(), strict=True):
            self.volume.device.write(region.offset, _bytes(seed))
            region.note_written(0, _bytes(seed))

    def _commit(self, step: int, states_step: int) -> None:
        self.store.commit(Step(step), self.store.attempt, "{}", states_step=Step(states_step))

    @staticmethod
    def _try(is_allowed: bool, act: Callable[[], None]) -> bool:
        try:
            act()
        except StepNotAllowed:
            assert not is_allowed
            return False
        assert is_allowed
        return True


def _act(model: _Model, data: st.DataObject) -> None:
    """Executes one random operation, allowed or not, at a step near the last commit."""
    first = 0 if model.step is None else model.step
    step, key = first + data.draw(st.integers(0, 3)), data.draw(st.sampled_from(KEYS))
    match data.draw(st.sampled_from(["fill", "fill", "write", "gradient", *["commit"] * 3, "reopen"])):
        case "fill":
            model.fill(step)
        case "write":
            model.write(key, data.draw(st.lists(st.sampled_from(KINDS), min_size=1, unique=True)), step)
        case "gradient":
            model.write(key, [StateKind.GRAD], step)
        case "commit":
            model.commit(step, data.draw(st.sampled_from([first, *model.labels.values()])))
        case "reopen":
            model.reopen()


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_holds_what_was_written_last_and_what_is_committed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        model = _Model(Path(name))
        for _ in range(data.draw(st.integers(1, 15))):
            _act(model, data)
            model.check()
        model.reopen()
        model.check()
        model.volume.close()
