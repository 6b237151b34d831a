"""The host chunks of streamed layers, whose params are copied to the device in pieces while they are computed."""

from dataclasses import dataclass, field

import torch

from windlass.actors.messages import ParamRequest, SpanKind
from windlass.actors.timeline import TO_DEVICE, WHOLE_BLOCK, SpanRecorder
from windlass.engine.device import Event, copy


@dataclass(slots=True, eq=False)
class HostChunks:
    """A PieceSource that reads from the chunks of one block in host memory."""

    chunk_numel: int
    request: ParamRequest
    spans: SpanRecorder
    _chunks: dict[int, torch.Tensor] = field(default_factory=dict)  # by number in the block

    def add(self, number: int, chunk: torch.Tensor) -> None:
        """Adds a chunk's params, which are now in host memory."""
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
