"""A chunk's update equals that of its place in the model: the cut into chunks changes no bit.

No two elements of the model are rounded with the same random bits.
"""

from typing import Any

import pytest
import torch

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import make_context
from windlass.actors.messages import UpdateBlock, UpdateStep
from windlass.actors.optimizer.chunk_updater import ChunkUpdater
from windlass.engine.model.layout import BlockLayout, ModelLayout, ParamSlice
from windlass.engine.optimizer.adam_formulas import AdamSettings
from windlass.engine.optimizer.adam_kernel import ChunkStates, OptimizerKernel
from windlass.engine.training_config.training_config import Optimizer
from windlass.storage.ids import BlockIndex, JobId, Kernel, Precision, StateKind, StatePrecision, Step

# Weight decay ends inside the second chunk of each block; the last chunk is short.
CHUNK_NUMEL, NUMEL, DECAY_NUMEL = 2048, 5000, 3001
NUM_BLOCKS = 3
HYPER: dict[str, Any] = {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.97, "epsilon": 0.2, "seed": 11}


def layout() -> ModelLayout:
    plain = make_layout(*[NUMEL] * NUM_BLOCKS, chunk_numel=CHUNK_NUMEL)
    params = (
        ParamSlice(name="weight", shape=(DECAY_NUMEL,), offset=0, numel=DECAY_NUMEL, decay=True),
        ParamSlice(
            name="bias", shape=(NUMEL - DECAY_NUMEL,), offset=DECAY_NUMEL, numel=NUMEL - DECAY_NUMEL, decay=False
        ),
    )
    blocks = tuple(BlockLayout(index=each.index, name=each.name, params=params) for each in plain.blocks)
    return ModelLayout(blocks=blocks, tied={}, chunk_numel=CHUNK_NUMEL, shared=plain.shared)


def states() -> tuple[torch.Tensor, dict[StateKind, torch.Tensor]]:
    """A gradient and the bf16 states of a block in the middle of training, the same for all blocks."""
    generator = torch.Generator().manual_seed(0)
    grad, param, exp_avg = torch.randn(3, NUMEL, generator=generator)
    exp_avg_sq = 0.1 * torch.rand(NUMEL, generator=generator)
    kinds = {StateKind.PARAM: param, StateKind.EXP_AVG: 0.1 * exp_avg, StateKind.EXP_AVG_SQ: exp_avg_sq}
    return grad, {kind: state.bfloat16() for kind, state in kinds.items()}


def command(block: int) -> UpdateBlock:
    """The update of a block in step 7, the fifth that was not skipped."""
    job, step = JobId("ftjob-1"), Step(7)
    how = UpdateStep(job=job, step=step, from_step=Step(6), optimizer_step=5, learning_rate=0.01, grad_scale=0.5)
    return UpdateBlock(job=job, step=step, block=BlockIndex(block), chunks=(), how=how)


def updated_in_chunks(block: int, **hyper: Any) -> dict[StateKind, torch.Tensor]:
    options = {"precision": Precision.BF16, "state_precision": StatePrecision.BF16, **HYPER, **hyper}
    context = make_context(make_spec(training=options), layout(), "/dev/shm/none")
    updater = ChunkUpdater(context)
    grad, held = states()
    for key in context.layout.chunk_keys(BlockIndex(block)):
        start, stop = context.layout.chunk_range(key)
        parts = {kind: state[start:stop].clone() for kind, state in held.items()}
        updater.update(command(block), start, grad[start:stop].clone(), parts)
        for kind, part in parts.items():
            held[kind][start:stop] = part
    return held


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize("block", [0, 2])
def test_chunk_updater_on_chunks_gives_the_bits_of_whole_block(block: int, optimizer: Optimizer) -> None:
    grad, held = states()
    adam = AdamSettings(beta1=0.8, beta2=0.97, epsilon=0.2, weight_decay=0.3, decoupled=optimizer is Optimizer.ADAMW)
    kernel = OptimizerKernel(
        adam,
        grad_dtype=torch.float32,
        param_dtype=torch.bfloat16,
        state_precision=StatePrecision.BF16,
        kernel=Kernel.FUSED,
    )
    kernel.update(
        ChunkStates(
            grad=grad,
            param=held[StateKind.PARAM],
            exp_avg=held[StateKind.EXP_AVG],
            exp_avg_sq=held[StateKind.EXP_AVG_SQ],
        ),
        learning_rate=0.01,
        step=5,
        grad_scale=0.5,
        decay_numel=DECAY_NUMEL,
        seed=11,
        position=block * 2**40,
    )
    for kind, state in updated_in_chunks(block, optimizer=optimizer).items():
        assert torch.equal(state, held[kind]), kind


def test_chunk_updater_rounds_every_element_of_model_with_bits_of_its_own() -> None:
    """Holds also if all elements are equal."""
    hyper = {"precision": Precision.BF16, "state_precision": StatePrecision.BF16, **HYPER}
    updater = ChunkUpdater(make_context(make_spec(training=hyper), layout(), "/dev/shm/none"))
    windows = []
    for block in range(NUM_BLOCKS):
        for start in (0, CHUNK_NUMEL):
            parts = {kind: state[:1].repeat(600) for kind, state in states()[1].items()}
            updater.update(command(block), start, torch.ones(600), parts)
            elements = list(zip(*(part.tolist() for part in parts.values()), strict=True))
            windows += [tuple(elements[i : i + 100]) for i in range(500)]
    assert len(set(windows)) == len(windows) == 2 * NUM_BLOCKS * 500
