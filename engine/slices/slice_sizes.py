"""The sizes of the parts in which the head goes over a micro-batch. It imports no torch, because a plan needs none.

`head_slices.py` and `grad_buffer.py` compute the parts.
"""

from windlass.storage.ids import HeadSlices

# Elements: limit of the logits of one small slice.
MAX_LOGITS_NUMEL = 64 * 2**20
# Elements: limit of the logits of one large slice. They take 512 MiB in bf16, and their gradient as much.
_MAX_LARGE_NUMEL = 256 * 2**20
# Tokens: limits of a large slice, which have priority over the limit of its logits. More tokens would not be faster.
# Fewer would add the projection's gradient, vocabulary times hidden, more often.
MIN_SLICE_TOKENS, MAX_SLICE_TOKENS = 1024, 4096
_TOKENS_UNIT = 128  # because kernels for matrix products work on tiles of up to 128 rows
# Elements: limit of the fp32 logits for which the loss is computed at once. Three such tensors are alive: 384 MiB.
MAX_PIECE_NUMEL = 32 * 2**20
# Elements: limit of the part of a product that is made before it is added to a buffer of another dtype.
MAX_PRODUCT_NUMEL = 16 * 2**20
# Rows: such a part has a multiple of this, because kernels for matrix products are slow on rows that are not aligned.
ROWS_UNIT = 128


def num_slice_tokens(slices: HeadSlices, vocab_size: int) -> int:
    """Returns the number of tokens whose logits exist at the same time."""
    if slices is HeadSlices.SMALL:
        return max(64, MAX_LOGITS_NUMEL // vocab_size)
    units = _MAX_LARGE_NUMEL // vocab_size // _TOKENS_UNIT
    return min(max(units * _TOKENS_UNIT, MIN_SLICE_TOKENS), MAX_SLICE_TOKENS)


def num_piece_tokens(slices: HeadSlices, vocab_size: int) -> int:
    """Returns the number of tokens for which the loss is computed at once."""
    if slices is HeadSlices.SMALL:
        return num_slice_tokens(slices, vocab_size)
    return max(1, MAX_PIECE_NUMEL // vocab_size)


def num_product_rows(width: int) -> int:
    """Returns the rows of a product that are made at once before they are added to a buffer of another dtype."""
    return max(1, MAX_PRODUCT_NUMEL // width // ROWS_UNIT) * ROWS_UNIT
