"""The gradients of layers that leave the device in pieces."""

from windlass.engine.pieces.grad_pieces import GradPieceBuffers as GradPieceBuffers
from windlass.engine.pieces.grad_pieces import PieceSums as PieceSums
from windlass.engine.pieces.grad_pieces import StreamedGrad as StreamedGrad
