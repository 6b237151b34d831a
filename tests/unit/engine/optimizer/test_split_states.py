"""A master that is split and joined again has the same bits, for any bits."""

import torch

from windlass.engine.optimizer.split_states import join_master, plain_exp_avg_sq, split_master

NUMEL = 4_000_000


def interesting_bits() -> torch.Tensor:
    """fp32 patterns as int32: random, ties of both signs and parities, denormals, the largest, infinities, NaNs."""
    generator = torch.Generator().manual_seed(1)
    anything = torch.randint(-(2**31), 2**31, (NUMEL,), generator=generator)
    upper = torch.arange(-(2**15), 2**15) << 16
    near_ties = [upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    denormal = torch.randint(0, 2**23, (100_000,), generator=generator)
    return torch.cat([anything, *near_ties, denormal, denormal - 2**31]).to(torch.int32)


def test_joined_is_what_was_split() -> None:
    master = interesting_bits().view(torch.float32)
    exp_avg_sq = torch.rand(master.numel(), generator=torch.Generator().manual_seed(2))
    param, residual, marked = split_master(master, exp_avg_sq)
    assert (param.dtype, residual.dtype, marked.dtype) == (torch.bfloat16, torch.int16, torch.float32)
    joined = join_master(param, residual, marked)
    numbers = ~master.isnan()
    assert torch.equal(joined[numbers].view(torch.int32), master[numbers].view(torch.int32))
    assert joined[~numbers].isnan().all()
    assert torch.equal(plain_exp_avg_sq(marked), exp_avg_sq)


def test_the_param_is_the_master_rounded_to_nearest_even() -> None:
    master = interesting_bits().view(torch.float32)
    param, _, _ = split_master(master, torch.zeros_like(master))
    numbers = ~master.isnan()
    # torch's scalar cast, element by element, would take minutes; its vector cast rounds denormals too.
    expected = master[numbers].to(torch.bfloat16)
    assert torch.equal(param[numbers].view(torch.int16), expected.view(torch.int16))
    assert param[~numbers].isnan().all()


def test_ties_mark_a_mean_of_squares_of_zero_too() -> None:
    tie = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    param, residual, marked = split_master(tie, torch.zeros(2))
    assert residual.tolist() == [-0x8000, -0x8000]
    assert param.view(torch.int16).tolist() == [0x3F80, 0x3F82]  # down to even, up to even
    assert torch.signbit(marked).tolist() == [True, False]
    assert torch.equal(join_master(param, residual, marked), tie)
