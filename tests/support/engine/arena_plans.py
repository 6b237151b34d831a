"""Plans of the arena of a small model."""

from dataclasses import replace
from typing import Any

from windlass.engine.memory_plan.arena.layout import make_plan
from windlass.engine.memory_plan.plan import (
    ModelSize,
    Plan,
)

CHUNK = 4096
GIB = 2**30
# 1, 3, 3, 3, 3 and 4 chunks.
SIZE = ModelSize(
    block_numels=(4000, 12000, 12000, 12000, 12000, 15000), chunk_numel=CHUNK, param_itemsize=2, state_itemsize=14
)


def sharing(*uses: tuple[int, int]) -> ModelSize:
    """Returns the sizes of a model in which blocks use the params of others: pairs (user, block)."""
    blocks = SIZE.blocks
    return replace(SIZE, shared=tuple((b, *(block for user, block in uses if user == b)) for b in blocks))


TIED = sharing((5, 0))


def plan(size: ModelSize = SIZE, **options: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_optimizers": 2,
        "grad_itemsize": 2,
        "keep_grads": False,
        "host_memory_nbytes": None,
    }
    return make_plan(size, **(settings | options))
