"""The states of parameters in a form that does not depend on the stored format: weight, exp_avg and exp_avg_sq.

The weight is the fp32 master. With bf16 states it is the param, which serves as the master.
"""

from collections.abc import Mapping

import torch

from windlass.engine.optimizer.split_states import join_master, plain_exp_avg_sq, split_master
from windlass.storage.ids import Formats, StateKind, StatePrecision

MOMENTS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
# Flat tensors of one length, by kind: the weight and the moments.
SavedStates = Mapping[StateKind, torch.Tensor]


def weight_kind(formats: Formats) -> StateKind:
    """Returns the kind of the saved weight."""
    return StateKind.PARAM if formats.states is StatePrecision.BF16 else StateKind.MASTER


def saved_dtype(formats: Formats) -> torch.dtype:
    """Returns the dtype of all saved states."""
    return torch.bfloat16 if formats.states is StatePrecision.BF16 else torch.float32


def to_saved(formats: Formats, states: Mapping[StateKind, torch.Tensor]) -> dict[StateKind, torch.Tensor]:
    """Converts stored states. The result may share their memory."""
    if formats.states is not StatePrecision.SPLIT:
        return {kind: states[kind] for kind in (weight_kind(formats), *MOMENTS)}
    marked = states[StateKind.EXP_AVG_SQ]
    return {
        StateKind.MASTER: join_master(states[StateKind.PARAM], states[StateKind.RESIDUAL], marked),
        StateKind.EXP_AVG: states[StateKind.EXP_AVG],
        StateKind.EXP_AVG_SQ: plain_exp_avg_sq(marked),
    }


def from_saved(formats: Formats, states: Mapping[StateKind, torch.Tensor], saved: SavedStates) -> None:
    """Replaces stored states by saved ones. States that `saved` lacks keep their values."""
    present = {**to_saved(formats, states), **saved}
    kinds: dict[StateKind, torch.Tensor] = {kind: present[kind] for kind in (weight_kind(formats), *MOMENTS)}
    if formats.states is StatePrecision.SPLIT:
        master, exp_avg_sq = kinds.pop(StateKind.MASTER).float(), kinds[StateKind.EXP_AVG_SQ].float()
        parts = split_master(master, exp_avg_sq)
        kinds |= zip((StateKind.PARAM, StateKind.RESIDUAL, StateKind.EXP_AVG_SQ), parts, strict=True)
    for kind, state in kinds.items():
        states[kind].copy_(state)
    if formats.derives_param and StateKind.MASTER in saved:
        states[StateKind.PARAM].copy_(states[StateKind.MASTER])
