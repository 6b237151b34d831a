"""Linear layers and embeddings that are computed in parts of their matrix."""

from windlass.engine.linear_parts.column_copy import Columns as Columns
from windlass.engine.linear_parts.column_copy import require_column_copies as require_column_copies
from windlass.engine.linear_parts.cut_embedding import CutEmbedding as CutEmbedding
from windlass.engine.linear_parts.cut_linear import CutLinear as CutLinear
from windlass.engine.linear_parts.cut_linear import MatrixParts as MatrixParts
from windlass.engine.linear_parts.whole_matrix import WholeMatrix as WholeMatrix
