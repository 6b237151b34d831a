"""Layers whose params come to the device in pieces: their chunks stay in host memory while they are computed."""

import itertools
from dataclasses import dataclass, field

import torch

from windlass.actors.context import JobContext
from windlass.actors.messages import PrefetchParams, SpanKind
from windlass.actors.spans import TO_DEVICE, WHOLE_BLOCK, SpanLog
from windlass.engine.device import copy
from windlass.engine.streams import Event
from windlass.planner.param_pieces import NUM_PIECE_BUFFERS, cut_layers
from windlass.planner.plan import PlanError
from windlass.storage.ids import BlockIndex


@dataclass(slots=True, eq=False)
class HostChunks:
    """A PieceSource: the chunks of one block, each where it lies in host memory."""

    chunk_numel: int
    request: PrefetchParams
    spans: SpanLog
    _chunks: dict[int, torch.Tensor] = field(default_factory=dict)  # by number

    def add(self, number: int, chunk: torch.Tensor) -> None:
        """One of them is there, as the params it holds."""
        self._chunks[number] = chunk

    def load(self, target: torch.Tensor, start: int) -> None:
        """See PieceSource."""
        stop = start + target.numel()
        for number in range(start // self.chunk_numel, -(-stop // self.chunk_numel)):
            chunk, first = self._chunks[number], number * self.chunk_numel
            low, high = max(start, first), min(stop, first + chunk.numel())
            copy(target[low - start : high - start], chunk[low - first : high - first])

    def loaded(self, begun: Event, copied: Event, nbytes: int) -> None:
        """See PieceSource."""
        kind, request = SpanKind.COPY_PARAMS_IN, self.request
        self.spans.note(
            TO_DEVICE, kind, request.step, request.block, WHOLE_BLOCK, begun.time_s(), copied.time_s(), nbytes
        )


def piece_bounds(context: JobContext) -> dict[BlockIndex, tuple[int, ...]]:
    """Where the plan's streamed blocks are cut (`planner.param_pieces`).

    Raises:
        PlanError: a module holds more pieces itself than there are buffers for.
    """
    streamed = [BlockIndex(block) for block in context.plan.streamed_blocks]
    layers = [context.layout.blocks[block].decay_numels_by_module for block in streamed]
    bounds = dict(zip(streamed, cut_layers(layers), strict=True))
    for block, modules in zip(streamed, layers, strict=True):
        stop = 0
        for module in modules:
            start, stop = stop, stop + sum(module)
            num_pieces = sum(low < stop and start < high for low, high in itertools.pairwise(bounds[block]))
            if num_pieces > NUM_PIECE_BUFFERS:
                raise PlanError(
                    f"block {block} cannot be streamed: a module of it holds params in {num_pieces} pieces and uses "
                    f"them at once, and there are {NUM_PIECE_BUFFERS} buffers; leave it out of streamed_blocks"
                )
    return bounds
