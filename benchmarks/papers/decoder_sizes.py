"""Computes the sizes of a decoder from its shape: parameters by block, matrices by layer, activations by operator.

It uses formulas only, so it works for shapes that are too large for this machine. `planner.profiling` uses the real
operators instead.
"""

from windlass.engine.memory_plan import ModelSize
from windlass.planner.cost import BlockProfile, LayerProfile, ModelProfile, OperatorProfile
from windlass.planner.cost.model_profile import shared_of
from windlass.planner.hardware import ModelShape

_ITEMSIZE = 2  # bytes of a param and of an activation: bf16 or fp16
_STATE_ITEMSIZE = 14  # bytes of all states of a parameter: param, fp32 master and moments


def kv_size(shape: ModelShape) -> int:
    """Returns the number of elements of a token's keys."""
    return shape.head_size * (shape.num_kv_heads or shape.num_heads)


def mlp_size(shape: ModelShape) -> int:
    """Returns the number of elements of a token inside the MLP."""
    return shape.intermediate_size or 4 * shape.hidden_size


def layer_matrices(shape: ModelShape) -> tuple[int, ...]:
    """Returns the number of elements of each matrix of a layer, in the order of its modules."""
    hidden, kv, mlp = shape.hidden_size, kv_size(shape), mlp_size(shape)
    if shape.is_gpt:
        return (3 * hidden * hidden, hidden * hidden, hidden * mlp, mlp * hidden)
    queries = shape.num_heads * shape.head_size
    return (queries * hidden, kv * hidden, kv * hidden, hidden * queries, mlp * hidden, mlp * hidden, hidden * mlp)


def block_numels(shape: ModelShape, *, num_tokens: int, is_tied: bool | None = None) -> tuple[int, ...]:
    """Returns the number of parameters of each block: the embedding, the layers, the head.

    `num_tokens`: positions that GPT's shape has embeddings for. `is_tied`: the head uses the embedding's matrix, which
    counts for the embedding. None: as the shape says.
    """
    hidden = shape.hidden_size
    table = shape.vocab_size * hidden
    embedding, small, norm = table, 2 * hidden, hidden
    if shape.qkv_bias:
        small += shape.num_heads * shape.head_size + 2 * kv_size(shape)
    if shape.qk_norm:
        small += 2 * shape.head_size
    if shape.is_gpt:
        # Position embeddings; norms with bias, and the biases of four matrices.
        embedding, small, norm = table + num_tokens * hidden, 13 * hidden, 2 * hidden
    head = norm if (shape.is_tied if is_tied is None else is_tied) else norm + table
    return (embedding, *(sum(layer_matrices(shape)) + small,) * shape.num_layers, head)


def model_size(numels: tuple[int, ...], *, chunk_numel: int, is_tied: bool) -> ModelSize:
    """Returns the sizes for a plan, in bf16."""
    return ModelSize(
        block_numels=numels,
        chunk_numel=chunk_numel,
        param_itemsize=_ITEMSIZE,
        state_itemsize=_STATE_ITEMSIZE,
        shared=shared_of(len(numels) - 2, is_tied=is_tied),
    )


def gpt_profile(
    shape: ModelShape, *, num_examples: int, num_tokens: int, chunk_numel: int, is_tied: bool = True
) -> ModelProfile:
    """Returns a profile of GPT's shape: 34 bytes of activations for each token, layer and element of the hidden size.

    Attention keeps no scores, and gelu is one operator. An operator includes all that follow it up to the next one that
    saves something: for example a matrix product with its dropout and sum.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, section 4.1, without the
    terms that FlashAttention avoids.
    """
    if not shape.is_gpt:
        raise ValueError("the shape is Llama's: it gives num_kv_heads or intermediate_size; leave both out")
    numels = block_numels(shape, num_tokens=num_tokens, is_tied=is_tied)
    all_tokens = num_examples * num_tokens
    unit = all_tokens * shape.hidden_size  # elements of a hidden state
    matmul = 2 * unit * shape.hidden_size  # operations of a square matrix
    saved = (  # bytes for each element of a hidden state: outputs in 16 bit, dropout masks in 8 bit
        ("norm", 2, 0),
        ("queries, keys, values", 6, 3 * matmul),
        ("attention", 2, 4 * unit * num_tokens),
        ("projection, dropout, sum", 3, matmul),
        ("norm of the sum", 2, 0),
        ("first matrix of the MLP", 8, 4 * matmul),
        ("gelu", 8, 0),
        ("second matrix of the MLP, dropout", 1, 4 * matmul),
    )
    layer = LayerProfile(
        numel=numels[1],
        num_flops=sum(num_flops for _, _, num_flops in saved),
        input_nbytes=_ITEMSIZE * unit,
        operators=tuple(
            OperatorProfile(
                name=name,
                outputs_nbytes=(nbytes * unit,),
                num_flops=num_flops,
                is_saved=True,
                reads=(index - 1,) if index else (),
            )
            for index, (name, nbytes, num_flops) in enumerate(saved)
        ),
    )
    return ModelProfile(
        name=f"GPT, {sum(numels) / 1e9:.1f}B",
        num_examples=num_examples,
        num_tokens=num_tokens,
        embedding=BlockProfile(numel=numels[0], num_flops=0),
        layers=(layer,) * shape.num_layers,
        head=BlockProfile(numel=numels[-1], num_flops=2 * unit * shape.vocab_size),
        shared=shared_of(shape.num_layers, is_tied=is_tied),
        chunk_numel=chunk_numel,
    )
