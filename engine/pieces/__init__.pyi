"""The gradients of layers that leave the device in pieces, and of blocks that share their memory."""

from windlass.engine.pieces.beside_total import HostTotal as HostTotal
from windlass.engine.pieces.beside_total import SumBesideTotal as SumBesideTotal
from windlass.engine.pieces.chunk_norms import ChunkNorms as ChunkNorms
from windlass.engine.pieces.grad_pieces import GradPieceBuffers as GradPieceBuffers
from windlass.engine.pieces.grad_pieces import PieceLanes as PieceLanes
from windlass.engine.pieces.grad_pieces import PieceSums as PieceSums
from windlass.engine.pieces.grad_pieces import RoundedSums as RoundedSums
from windlass.engine.pieces.grad_pieces import StreamedGrad as StreamedGrad
from windlass.engine.pieces.grad_pieces import TiedSums as TiedSums
