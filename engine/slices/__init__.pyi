"""The sizes of the parts in which the head goes over a micro-batch."""

from windlass.engine.slices.slice_sizes import num_piece_tokens as num_piece_tokens
from windlass.engine.slices.slice_sizes import num_product_rows as num_product_rows
from windlass.engine.slices.slice_sizes import num_slice_tokens as num_slice_tokens
