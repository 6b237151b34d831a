"""The division of a job's blocks among boxes before and after a move, and the order in which the chunks go.

It does no I/O.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from windlass.actors.job import JobSpec, aligned
from windlass.actors.worker_policy import Stage
from windlass.amounts import bytes_text
from windlass.engine.model import ModelLayout
from windlass.storage.ids import BlockIndex, BoxName, ChunkKey, Formats, LayoutEpoch, Span, StateKind
from windlass.storage.integrity import buffer_digest

# The outcome of an attempt after which the new division is in force.
MOVED = "moved"


class ChunkMove(NamedTuple):
    """One chunk on its way. Boxes are indices among those that take part in the move."""

    key: ChunkKey
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksMoved:
    """The blocks that one box gets from another one, or keeps."""

    source: BoxName
    target: BoxName
    num_blocks: int
    nbytes: int

    def __str__(self) -> str:
        blocks = "1 block" if self.num_blocks == 1 else f"{self.num_blocks} blocks"
        return f"{bytes_text(self.nbytes)} of {blocks} from {self.source} to {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSpec:
    """A move of a job's states to a new division of its blocks, as one of the boxes that take part sees it.

    The first box has the log of decisions, so it is the first one of both divisions. A box may be in one of them only.
    """

    box: int  # index of this box among those that take part
    epoch: LayoutEpoch  # of the new division
    names: tuple[BoxName, ...]  # of those boxes
    holders: tuple[Stage | None, ...]  # the blocks that each of them has; None: none
    owners: tuple[Stage | None, ...]  # the blocks that each of them gets; None: none
    old: JobSpec | None  # this box's part of the division before; None: it has none
    new: JobSpec | None  # this box's part of the division after; None: it has none

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.holders) == len(self.owners):
            raise ValueError(f"{len(self.names)} boxes, {len(self.holders)} holders and {len(self.owners)} owners")
        if not (self.holders[0] and self.owners[0]) or self.holders[0].first or self.owners[0].first:
            raise ValueError("the first box of a job has the log of its commits, so it stays the first one")
        if self.old is not None and self.new is not None:
            before, after = self.old, self.new
            if (before.job, before.attempt, before.training.formats) != (
                after.job,
                after.attempt,
                after.training.formats,
            ):
                raise ValueError("a move changes neither the job nor its number formats, and is one attempt")
            if before.layout_epoch >= after.layout_epoch:
                raise ValueError(f"layout epoch {after.layout_epoch} does not follow {before.layout_epoch}")
        if self.new is not None and self.new.layout_epoch != self.epoch:
            raise ValueError(f"this box gets blocks in epoch {self.new.layout_epoch}, and the move is to {self.epoch}")

    @property
    def any(self) -> JobSpec:
        """The box's part of one of the divisions, for what both have in common."""
        spec = self.new or self.old
        assert spec is not None, "a box that takes part has blocks or gets some"
        return spec

    @property
    def name(self) -> BoxName:
        """The name of this box."""
        return self.names[self.box]

    def digest(self, layout: ModelLayout) -> str:
        """Returns a digest of what all boxes must know alike, because their order of chunks follows from it."""
        facts = (self.epoch, self.names, self.holders, self.owners, layout.blocks, layout.chunk_numel)
        return f"{buffer_digest(memoryview(repr(facts).encode())):016x}"

    def chunks(self, layout: ModelLayout) -> list[ChunkMove]:
        """Lists all chunks of the job in the one order in which all boxes send and receive them.

        One order prevents deadlocks, because the first chunk that is not there waits for no other. All pairs of boxes
        advance alike, so that no network card is idle while another box is served.
        """
        routes = [ChunkMove(key, source, target) for source, target, key in self._routes(layout)]
        totals = Counter((each.source, each.target) for each in routes)
        seen: Counter[tuple[int, int]] = Counter()
        ranks = []
        for each in routes:
            pair = (each.source, each.target)
            seen[pair] += 1
            ranks.append((Fraction(seen[pair], totals[pair]), pair))
        return [each for _, each in sorted(zip(ranks, routes, strict=True))]

    def moved(self, layout: ModelLayout) -> list[BlocksMoved]:
        """Returns what passes between each two boxes."""
        blocks: dict[tuple[int, int], set[int]] = {}
        nbytes: Counter[tuple[int, int]] = Counter()
        formats = self.any.training.formats
        for source, target, key in self._routes(layout):
            if source != target:
                blocks.setdefault((source, target), set()).add(key.block)
                nbytes[source, target] += slot_nbytes(packed_parts(layout, formats, key))
        return [
            BlocksMoved(
                source=self.names[source],
                target=self.names[target],
                num_blocks=len(found),
                nbytes=nbytes[source, target],
            )
            for (source, target), found in sorted(blocks.items())
        ]

    def states_nbytes(self, layout: ModelLayout) -> int:
        """Returns the bytes of all states, also of those that stay on their box, as they are copied."""
        formats = self.any.training.formats
        return sum(slot_nbytes(packed_parts(layout, formats, key)) for _, _, key in self._routes(layout))

    def _routes(self, layout: ModelLayout) -> Iterator[tuple[int, int, ChunkKey]]:
        whole = layout.of_blocks(0, len(layout.blocks))
        for block in range(len(layout.blocks)):
            source, target = _having(self.holders, block), _having(self.owners, block)
            for key in whole.chunk_keys(BlockIndex(block)):
                yield source, target, key


def packed_parts(layout: ModelLayout, formats: Formats, key: ChunkKey) -> dict[StateKind, Span]:
    """Returns the place of each state of a chunk in a slot, one after the other without gaps."""
    start, stop = layout.chunk_range(key)
    parts, offset = {}, 0
    for kind, itemsize in formats.itemsizes.items():
        parts[kind] = Span(offset, aligned((stop - start) * itemsize))
        offset += parts[kind].nbytes
    return parts


def slot_nbytes(parts: dict[StateKind, Span]) -> int:
    """Returns the bytes of a chunk's states in a slot."""
    return sum(part.nbytes for part in parts.values())


def blocks_text(stage: Stage, num_blocks: int) -> str:
    """Describes the blocks of a box: the embedding, layers by number from 1, the head."""
    first, last = max(1, stage.first), min(stage.stop, num_blocks - 1) - 1
    layers = [f"layer {first}" if first == last else f"layers {first} to {last}"] if first <= last else []
    parts = [*["the embedding"] * stage.has(0), *layers, *["the head"] * stage.has(num_blocks - 1)]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _having(stages: Sequence[Stage | None], block: int) -> int:
    return next(box for box, stage in enumerate(stages) if stage is not None and stage.has(block))
