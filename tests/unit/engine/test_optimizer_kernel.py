"""The kernel is torch's AdamW, chunk by chunk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.engine.optimizer_kernel import AdamW, AdamWSettings, ChunkStates

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
NUM_STEPS = 5


def reference(
    master: torch.Tensor, grads: list[torch.Tensor], decay_numel: int, rates: list[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch.optim.AdamW on the same numbers, in two groups: (params, exp_avg, exp_avg_sq)."""
    parts = [torch.nn.Parameter(master[:decay_numel].clone()), torch.nn.Parameter(master[decay_numel:].clone())]
    groups = [{"params": [part], "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for grad, rate in zip(grads, rates, strict=True):
        parts[0].grad, parts[1].grad = grad[:decay_numel].clone(), grad[decay_numel:].clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    states = [torch.cat([optimizer.state[part][name] for part in parts]) for name in ("exp_avg", "exp_avg_sq")]
    return torch.cat([part.detach() for part in parts]), *states


@given(
    numel=st.integers(1, 300),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
    grad_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    grad_scale=st.sampled_from([1.0, 0.37]),
    has_param=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_it_equals_torchs_adamw(
    numel: int, share: float, seed: int, grad_dtype: torch.dtype, grad_scale: float, has_param: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    decay_numel = round(share * numel)
    master = torch.randn(numel, generator=generator)
    grads = [torch.randn(numel, generator=generator).to(grad_dtype) for _ in range(NUM_STEPS)]
    rates = [1e-2 / step for step in range(1, NUM_STEPS + 1)]
    states = ChunkStates(
        grad=grads[0],
        master=master.clone(),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        param=torch.zeros(numel, dtype=torch.bfloat16) if has_param else None,
    )
    for step, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        states.grad = grad.clone()
        AdamW(SETTINGS).update(states, learning_rate=rate, step=step, grad_scale=grad_scale, decay_numel=decay_numel)
        assert torch.equal(states.grad, grad)  # the slot may be read again, by a retry
    expected = reference(master, [grad.float() * grad_scale for grad in grads], decay_numel, rates)
    for found, wanted in zip((states.master, states.exp_avg, states.exp_avg_sq), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    if states.param is not None:
        assert torch.equal(states.param, states.master.to(torch.bfloat16))


def test_cutting_a_vector_into_chunks_changes_no_bit() -> None:
    numel, cut, decay_numel = 5000, 2048, 3000
    torch.manual_seed(0)
    master, grad = torch.randn(numel), torch.randn(numel)
    whole = ChunkStates(
        grad=grad, master=master.clone(), exp_avg=torch.zeros(numel), exp_avg_sq=torch.zeros(numel), param=None
    )
    AdamW(SETTINGS).update(whole, learning_rate=1e-3, step=1, grad_scale=1.0, decay_numel=decay_numel)
    for start in range(0, numel, cut):
        stop = min(start + cut, numel)
        size = stop - start
        part = ChunkStates(
            grad=grad[start:stop],
            master=master[start:stop].clone(),
            exp_avg=torch.zeros(size),
            exp_avg_sq=torch.zeros(size),
            param=None,
        )
        decay = min(max(decay_numel - start, 0), size)
        AdamW(SETTINGS).update(part, learning_rate=1e-3, step=1, grad_scale=1.0, decay_numel=decay)
        assert torch.equal(part.master, whole.master[start:stop])
        assert torch.equal(part.exp_avg_sq, whole.exp_avg_sq[start:stop])


def test_it_updates_in_place() -> None:
    """The states are views of slots in the arena."""
    slot = torch.zeros(4 * 64)
    grad, master, exp_avg, exp_avg_sq = slot.split(64)
    grad.fill_(1.0)
    states = ChunkStates(grad=grad, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param=None)
    AdamW(SETTINGS).update(states, learning_rate=1e-2, step=1, grad_scale=1.0, decay_numel=0)
    assert slot[64:].all()
    assert slot[64:128].tolist() == pytest.approx([-1e-2] * 64, rel=1e-5)


def test_a_chunk_without_elements_is_nothing_to_do() -> None:
    empty = [torch.zeros(0) for _ in range(4)]
    states = ChunkStates(grad=empty[0], master=empty[1], exp_avg=empty[2], exp_avg_sq=empty[3], param=None)
    AdamW(SETTINGS).update(states, learning_rate=1e-2, step=1, grad_scale=0.5, decay_numel=0)
