"""The blocks of a model in two runners, as on two boxes: the same gradients to the bit as in one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.engine.activation_runs import STEP, Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from windlass.engine.model.block_runner import GroupActivations
from windlass.engine.model.head_slices import IGNORED_TARGET, LossSums
from windlass.engine.model.layout import UnsupportedArchitectureError
from windlass.storage.ids import BlockIndex

BATCH, TARGETS = make_batch((2, 16), (1, 9))
HEAD = 4
# Cuts after the embedding, between layers, and before the head.
CUTS = (1, 3, HEAD)


def make_run(name: str) -> Run:
    return Run(make_model(ARCHITECTURES[name].config(tied=False, dropout=0.1)))


def gradients(run: Run, blocks: Sequence[int]) -> dict[str, torch.Tensor]:
    found = {}
    for block in (run.layout.blocks[block] for block in blocks):
        buffer = run.grads[block.index]
        buffer.finish([(param.name, param.offset, param.numel) for param in block.params])
        for param in block.params:
            found[param.name] = buffer.flat[param.offset : param.offset + param.numel].view(param.shape)
    return found


def step_in_two(first: Run, second: Run, cut: int) -> dict[str, torch.Tensor]:
    """Runs a step of two groups with a micro-batch each. Both pass the first stage before one returns."""
    here, there = list(map(BlockIndex, range(cut))), list(map(BlockIndex, range(cut, HEAD)))
    num_targets = sum(int((target != IGNORED_TARGET).sum()) for target in TARGETS)
    waiting, sent = [], []
    for group, ids in enumerate(BATCH):
        first.runner.exchange(GroupActivations(first_microbatch=group))
        for block in here:
            first.forward(block, [ids])
        sent.append(first.runner.take_outputs())
        waiting.append(first.runner.exchange(GroupActivations()))
    for group, ids in enumerate(BATCH):
        second.runner.first_microbatch = group
        if there:
            second.runner.enter(STEP, [ids], sent[group])
        else:
            second.runner.inputs = [sent[group]]
        for block in there:
            second.forward(block, [ids])
        second.lend(BlockIndex(HEAD), with_grads=True)
        sums = LossSums.nothing(num_targets, torch.device("cpu"))
        second.runner.head(STEP, [TARGETS[group]], sums=sums)
        second.take_back(BlockIndex(HEAD))
        for block in reversed(there):
            second.backward(block, [ids])
        first.runner.exchange(waiting[group])
        first.runner.grads = second.runner.take_grads()
        for block in reversed(here):
            first.backward(block, [ids])
    return gradients(first, range(cut)) | gradients(second, range(cut, HEAD + 1))


@pytest.mark.short("*-3", "Gemma-2-1", "Qwen2-4")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_on_two_boxes_have_the_gradients_of_one(name: str, cut: int) -> None:
    whole = make_run(name).step(BATCH, TARGETS)
    first, second = make_run(name), make_run(name)
    if cut < HEAD:
        second.runner.require_independent_calls()
    for block in range(HEAD + 1):  # a box has only its own params
        run = second if block < cut else first
        for param in run.layout.blocks[block].params:
            run.params[param.name] = torch.full_like(run.params[param.name], torch.nan)
    found = step_in_two(first, second, cut)
    assert found.keys() == whole.keys()
    assert [name for name, grad in found.items() if not torch.equal(grad, whole[name])] == []


def test_arguments_that_depend_on_the_embedding_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("Qwen2")
    forward = run.partition.model.model.rotary_emb.forward

    def shifted(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cos, sin = forward(hidden, *args, **kwargs)
        return cos + hidden.mean(), sin

    monkeypatch.setattr(run.partition.model.model.rotary_emb, "forward", shifted)
    with pytest.raises(UnsupportedArchitectureError, match="passes its layers tensors that depend on the embedding"):
        run.runner.require_independent_calls()
