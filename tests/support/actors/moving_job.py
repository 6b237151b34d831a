"""A job whose states are random bytes, and which moves between boxes."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

from tests.support.storage.direct_store import DirectStore
from tests.support.training import boxes_of, make_partition, make_spec
from windlass.actors.job.context import stage_of, store_geometry
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.moving.division import MoveSpec, packed_parts
from windlass.actors.runtime.start_up import decisions_path
from windlass.actors.worker_policy.stages import Stage
from windlass.storage.ids import Attempt, BoxName, ChunkKey, JobId, LayoutEpoch, Precision, StateKind, Step
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.decisions import Decision, DecisionLog
from windlass.storage.store.tensor_store import TensorStore, spaces_in

NAMES = BoxName("north"), BoxName("east"), BoxName("south")
NUM_BLOCKS = 5
ONE_BOX = (Stage(0, NUM_BLOCKS),)
States = dict[tuple[ChunkKey, StateKind], bytes]


class MovingJob:
    """A job on one box or several. A job on one box has no stages, and SSDs of its own."""

    def __init__(self, spec: JobSpec, stages: tuple[Stage, ...] = ONE_BOX) -> None:
        self.spec = spec
        self.layout = make_partition(self.spec).layout
        self.stages, self.epoch, self.attempt = stages, 0, 1

    @classmethod
    def make(cls, root: Path, stages: tuple[Stage, ...] = ONE_BOX, *, tied: bool = False) -> Self:
        """A job in bf16, which has committed nothing."""
        return cls(make_spec(root, precision=Precision.BF16, tied=tied), stages)

    def boxes(self, stages: tuple[Stage, ...] | None = None, epoch: int | None = None) -> list[JobSpec]:
        """The boxes of a division, by default of that of now, in the attempt of now."""
        stages = self.stages if stages is None else stages
        specs = boxes_of(self.spec, stages) if len(stages) > 1 else [self.spec]
        epoch = self.epoch if epoch is None else epoch
        return [
            dataclasses.replace(each, layout_epoch=LayoutEpoch(epoch), attempt=Attempt(self.attempt)) for each in specs
        ]

    def moves(self, stages: tuple[Stage, ...]) -> list[MoveSpec]:
        """The next attempt, which moves the states to another division."""
        self.attempt += 1
        pairs = list(itertools.zip_longest(self.boxes(), self.boxes(stages, self.epoch + 1)))
        holders, owners = (
            tuple(None if spec is None else stage_of(spec, NUM_BLOCKS) for spec in specs)
            for specs in zip(*pairs, strict=True)
        )
        epoch, names = LayoutEpoch(self.epoch + 1), NAMES[: len(pairs)]
        return [
            MoveSpec(box=box, epoch=epoch, names=names, holders=holders, owners=owners, old=old, new=new)
            for box, (old, new) in enumerate(pairs)
        ]

    def moved(self, stages: tuple[Stage, ...]) -> None:
        """Records that a move has succeeded."""
        self.stages, self.epoch = stages, self.epoch + 1

    def commit(self, step: int) -> States:
        """Writes random states, commits them as those of a step, and returns them."""
        written: States = {}
        first, *_ = specs = self.boxes()
        for spec, stage in zip(specs, self.stages, strict=True):
            layout = self.layout.of_blocks(*stage)
            for index, name in enumerate(spec.ssd_dirs):
                with closing(Volume.open(name, direct=False)) as volume:
                    weights = (1,) * len(spec.ssd_dirs)
                    store = DirectStore.create(volume, store_geometry(spec, layout, weights, index))
                    store.resume_from(None)
                    for key, kind, nbytes in self._states_on(store):
                        written[key, kind] = random.Random(repr((key, kind))).randbytes(nbytes)
                        store.write(key, kind, Step(step), memoryview(bytearray(written[key, kind])))
                    store.prepare(Step(step), spec.attempt, "{}")
        with closing(DecisionLog(decisions_path(first))) as log:
            log.append(
                Decision.make(step=Step(step), attempt=first.attempt, epoch=first.layout_epoch, trainer_state="{}")
            )
        return written

    def states(self, step: int) -> States:
        """The states that the boxes of now have, as the next attempt reads them."""
        self.attempt += 1
        found: States = {}
        for spec in self.boxes():
            for name in spec.ssd_dirs:
                with closing(Volume.open(name, direct=False)) as volume:
                    store = DirectStore.open(volume, spec.job, spec.attempt, spec.layout_epoch)
                    store.resume_from(store.commits()[-1])
                    for key, kind, nbytes in self._states_on(store):
                        buffer = bytearray(nbytes)
                        store.read(key, kind, Step(step), memoryview(buffer))
                        found[key, kind] = bytes(buffer)
        return found

    def _states_on(self, store: TensorStore) -> Iterator[tuple[ChunkKey, StateKind, int]]:
        geometry = store.geometry
        for block in self.layout.blocks:
            for key in self.layout.chunk_keys(block.index):
                if key.chunk < geometry.chunks_per_block[block.index] and geometry.ssd_of(key) == geometry.ssd:
                    for kind, part in packed_parts(self.layout, geometry.formats, key).items():
                        yield key, kind, part.nbytes


def epochs_on(specs: Sequence[MoveSpec]) -> list[set[int]]:
    """The layout epochs of the stores on the SSDs of each box."""
    return [
        {
            int(epoch)
            for name in {name for part in (spec.old, spec.new) if part is not None for name in part.ssd_dirs}
            for epoch in _epochs(name, spec.any.job)
        }
        for spec in specs
    ]


def _epochs(ssd_dir: str, job: JobId) -> set[LayoutEpoch]:
    with closing(Volume.open(ssd_dir, direct=False)) as volume:
        return set(spaces_in(volume).get(job, {}))


@contextmanager
def hidden(path: Path) -> Iterator[None]:
    """Takes a file away for a time."""
    away = path.with_suffix(".away")
    path.rename(away)
    yield
    path.unlink(missing_ok=True)
    away.rename(path)
