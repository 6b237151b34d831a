"""Both kernels compute Adam in every format, for any chunk length and any end of weight decay."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engine.adam_reference import ADAM, ADAMW, Adam64, random_states
from tests.support.examples import examples
from windlass.engine.optimizer.adam_formulas import AdamSettings
from windlass.engine.optimizer.adam_kernel import ChunkStates, Kernel, OptimizerKernel, WrongStates
from windlass.engine.optimizer.kernel_cache import KernelUnavailable
from windlass.engine.optimizer.split_states import join_master, split_master
from windlass.storage.ids import StatePrecision

BF16 = torch.bfloat16
MakeKernel = Callable[..., OptimizerKernel]


@pytest.fixture(scope="module", params=list(Kernel))
def make_kernel(request: pytest.FixtureRequest) -> MakeKernel:
    """Makes AdamW kernels for models and gradients in bf16."""
    cache_dir = request.getfixturevalue("kernel_dir") if request.param is Kernel.COMPILED else None

    def make(states: StatePrecision, adam: AdamSettings = ADAMW) -> OptimizerKernel:
        return OptimizerKernel(
            adam, grad_dtype=BF16, param_dtype=BF16, state_precision=states, kernel=request.param, cache_dir=cache_dir
        )

    return make


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def copied(states: ChunkStates, part: slice = slice(None)) -> ChunkStates:
    """A copy of a part of a chunk."""
    fields = {field.name: getattr(states, field.name) for field in dataclasses.fields(states)}
    return ChunkStates(**{name: None if state is None else state[part].clone() for name, state in fields.items()})


def bits_of(states: ChunkStates) -> list[torch.Tensor]:
    """All states except the gradient, as integers."""
    words = {2: torch.int16, 4: torch.int32}
    held = [states.param, states.master, states.residual, states.exp_avg, states.exp_avg_sq]
    return [state.view(words[state.element_size()]) for state in held if state is not None]


def master_of(states: ChunkStates) -> torch.Tensor:
    if states.residual is not None and states.param is not None:
        return join_master(states.param, states.residual, states.exp_avg_sq)
    weights = states.param if states.master is None else states.master
    assert weights is not None
    return weights


@given(
    numel=st.one_of(st.integers(1, 40), st.integers(1, 3000)),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
    grad_scale=st.sampled_from([1.0, 0.37]),
    states=st.sampled_from([StatePrecision.FP32, StatePrecision.SPLIT]),
    first_step=st.sampled_from([1, 3]),
    epsilon=st.sampled_from([1e-8, 0.2]),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_steps_are_those_of_the_papers(
    make_kernel: MakeKernel,
    numel: int,
    share: float,
    seed: int,
    grad_scale: float,
    states: StatePrecision,
    first_step: int,
    epsilon: float,
) -> None:
    adam = dataclasses.replace(ADAMW, epsilon=epsilon)
    decay_numel = round(share * numel)
    chunk = random_states(numel, states, BF16, BF16, seed)
    reference = Adam64(adam, master_of(chunk).double(), chunk.exp_avg.double(), chunk.exp_avg_sq.abs().double())
    kernel = make_kernel(states, adam)
    for step in range(first_step, first_step + 3):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(BF16)
        chunk.grad = grad.clone()
        kernel.update(chunk, learning_rate=1e-2 / step, step=step, grad_scale=grad_scale, decay_numel=decay_numel)
        assert torch.equal(chunk.grad, grad)  # the slot may be read again by a retry
        reference.step(grad.double() * grad_scale, 1e-2 / step, step, decay_numel)
    torch.testing.assert_close(master_of(chunk).double(), reference.weights, rtol=3e-6, atol=1e-6)
    torch.testing.assert_close(chunk.exp_avg.double(), reference.exp_avg, rtol=3e-6, atol=1e-7)
    torch.testing.assert_close(chunk.exp_avg_sq.abs().double(), reference.exp_avg_sq, rtol=3e-6, atol=1e-7)
    assert chunk.param is not None
    assert torch.equal(chunk.param, master_of(chunk).to(BF16))


def test_kernel_equals_torchs_adamw(make_kernel: MakeKernel) -> None:
    numel = 4096
    chunk = random_states(numel, StatePrecision.FP32, BF16, BF16, 0)
    chunk.exp_avg.zero_(), chunk.exp_avg_sq.zero_()
    weights = torch.nn.Parameter(master_of(chunk).clone())
    optimizer = torch.optim.AdamW([weights], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    kernel = make_kernel(StatePrecision.FP32)
    for step in range(1, 21):
        weights.grad = chunk.grad.float()
        optimizer.step()
        kernel.update(chunk, learning_rate=1e-2, step=step, grad_scale=1.0, decay_numel=numel)
    torch.testing.assert_close(chunk.master, weights.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("epsilon", [1e-8, 0.2])
@pytest.mark.parametrize("states", [StatePrecision.FP32, StatePrecision.SPLIT, StatePrecision.BF16])
def test_the_fused_kernel_does_adam_too(states: StatePrecision, epsilon: float, step: int) -> None:
    adam = dataclasses.replace(ADAM, epsilon=epsilon)
    chunk = random_states(1000, states, torch.float16, BF16, 1)
    reference = Adam64(adam, master_of(chunk).double(), chunk.exp_avg.double(), chunk.exp_avg_sq.abs().double())
    kernel = OptimizerKernel(
        adam, grad_dtype=torch.float16, param_dtype=BF16, state_precision=states, kernel=Kernel.FUSED
    )
    kernel.update(chunk, learning_rate=1e-2, step=step, grad_scale=0.3, decay_numel=501)
    reference.step(chunk.grad.double() * 0.3, 1e-2, step, 501)
    tolerance = 2**-7 if states is StatePrecision.BF16 else 3e-6
    torch.testing.assert_close(master_of(chunk).double(), reference.weights, rtol=tolerance, atol=1e-6)


def patterns() -> torch.Tensor:
    """fp32 masters with any bits, half of them ties, including the largest and smallest numbers."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (2_000_001,), generator=generator)
    bits[: 2**20] = (bits[: 2**20] & -0x10000) | 0x8000
    bits[2**20 : 2**20 + 10_000] &= 0x807FFFFF  # denormal
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.short("fused-0.001", "compiled-0.0")
@pytest.mark.parametrize("learning_rate", [0.0, 1e-3])
def test_split_states_are_fp32_states_bit_for_bit(make_kernel: MakeKernel, learning_rate: float) -> None:
    master = patterns()
    numel = master.numel()
    full = random_states(numel, StatePrecision.FP32, BF16, BF16, 7)
    full.master = master
    param, residual, exp_avg_sq = split_master(master, full.exp_avg_sq)
    split = ChunkStates(
        grad=full.grad, param=param, residual=residual, exp_avg=full.exp_avg.clone(), exp_avg_sq=exp_avg_sq
    )
    kernels = [(make_kernel(StatePrecision.FP32), full), (make_kernel(StatePrecision.SPLIT), split)]
    num_ties = 0
    for step in range(1, 6):
        for kernel, chunk in kernels:
            kernel.update(chunk, learning_rate=learning_rate, step=step, grad_scale=0.7, decay_numel=1_000_001)
        numbers = ~full.master.isnan()
        joined = join_master(split.param, split.residual, split.exp_avg_sq)
        assert torch.equal(joined[numbers].view(torch.int32), full.master[numbers].view(torch.int32))
        assert joined[~numbers].isnan().all()
        assert split.param[~numbers].isnan().all()
        assert torch.equal(split.param[numbers].view(torch.int16), full.param[numbers].view(torch.int16))
        assert torch.equal(split.exp_avg.view(torch.int32), full.exp_avg.view(torch.int32))
        assert torch.equal(split.exp_avg_sq.abs(), full.exp_avg_sq)
        num_ties += int(torch.signbit(split.exp_avg_sq).sum())
    assert num_ties > 0


def test_many_steps_of_split_states_are_those_of_fp32(make_kernel: MakeKernel) -> None:
    numel = 1001
    full, split = (
        random_states(numel, states, BF16, BF16, 3) for states in (StatePrecision.FP32, StatePrecision.SPLIT)
    )
    kernels = [(make_kernel(StatePrecision.FP32), full), (make_kernel(StatePrecision.SPLIT), split)]
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 301):
        grad = torch.randn(numel, generator=generator).to(BF16)
        for kernel, chunk in kernels:
            chunk.grad = grad
            kernel.update(chunk, learning_rate=1e-3, step=step, grad_scale=1.0, decay_numel=501)
    assert torch.equal(master_of(split), full.master)
    assert torch.equal(split.param, full.param)


@pytest.mark.parametrize("states", list(StatePrecision))
@pytest.mark.parametrize("decay_numel", [0, 1, 3001, 4000, 6000])
def test_cutting_a_vector_into_chunks_changes_no_bit(
    make_kernel: MakeKernel, states: StatePrecision, decay_numel: int
) -> None:
    numel, start_of_chunk = 6000, 2**33 - 2048  # the key of the random bits changes inside
    common = {"learning_rate": 1e-2, "step": 2, "grad_scale": 0.5, "seed": 9}
    whole = random_states(numel, states, BF16, BF16, 0)
    parts = [copied(whole, slice(start, start + 2048)) for start in range(0, numel, 2048)]
    kernel = make_kernel(states)
    torch.set_num_threads(2)
    kernel.update(whole, decay_numel=decay_numel, position=start_of_chunk, **common)
    torch.set_num_threads(1)
    for index, part in enumerate(parts):
        start = index * 2048
        decay = min(max(decay_numel - start, 0), part.grad.numel())
        kernel.update(part, decay_numel=decay, position=start_of_chunk + start, **common)
    for found, wanted in zip(zip(*map(bits_of, parts), strict=True), bits_of(whole), strict=True):
        assert torch.equal(torch.cat(found), wanted)


def test_bf16_states_repeat_and_depend_on_seed_step_and_position(make_kernel: MakeKernel) -> None:
    start = random_states(10_000, StatePrecision.BF16, BF16, BF16, 0)
    kernel = make_kernel(StatePrecision.BF16)

    def updated(seed: int, position: int) -> list[torch.Tensor]:
        chunk = copied(start)
        kernel.update(chunk, learning_rate=1e-2, step=3, grad_scale=1.0, decay_numel=77, seed=seed, position=position)
        return bits_of(chunk)

    first = updated(1, 0)
    assert all(torch.equal(*pair) for pair in zip(first, updated(1, 0), strict=True))
    for other in (updated(2, 0), updated(1, 10_000)):
        assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))


def test_bf16_states_are_rounded_to_a_neighbour_and_right_on_average(make_kernel: MakeKernel) -> None:
    numel = 1_000_001
    chunk = random_states(numel, StatePrecision.BF16, BF16, BF16, 1)
    reference = Adam64(ADAMW, chunk.param.double(), chunk.exp_avg.double(), chunk.exp_avg_sq.double())
    make_kernel(StatePrecision.BF16).update(
        chunk, learning_rate=1e-3, step=2, grad_scale=1.0, decay_numel=numel // 3, seed=4
    )
    reference.step(chunk.grad.double(), 1e-3, 2, numel // 3)
    expected = (reference.weights, reference.exp_avg, reference.exp_avg_sq)
    for found, exact in zip((chunk.param, chunk.exp_avg, chunk.exp_avg_sq), expected, strict=True):
        # The gap between bf16 neighbours. Near zero, differences of larger numbers have the errors of those.
        gap = (2.0 ** (torch.frexp(exact).exponent.double() - 8)).clamp_min(1e-5)
        errors = (found.double() - exact) / gap
        assert errors.abs().max().item() < 1.01
        # A single rounding error is below one gap, so this is six standard deviations of the mean.
        assert abs(errors.mean().item()) < 6 * 0.5 / numel**0.5


@pytest.mark.parametrize("states", list(StatePrecision))
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_values_not_finite_stay_not_finite(make_kernel: MakeKernel, states: StatePrecision, bad: float) -> None:
    chunk = random_states(101, states, BF16, BF16, 0)
    before = copied(chunk)
    chunk.grad[50] = bad
    make_kernel(states).update(chunk, learning_rate=1e-3, step=1, grad_scale=1.0, decay_numel=60)
    assert not chunk.exp_avg[50].isfinite()
    assert not chunk.exp_avg_sq[50].isfinite()
    assert not master_of(chunk)[50].isfinite()
    others = torch.arange(101) != 50
    assert master_of(chunk)[others].isfinite().all()
    assert not torch.equal(master_of(chunk)[others], master_of(before)[others])


def test_it_updates_views_of_an_arena(make_kernel: MakeKernel) -> None:
    """Slots are views of bytes."""
    arena = torch.zeros(4096 * 4, dtype=torch.uint8)
    views = [arena[offset : offset + 2 * 64].view(BF16) for offset in range(0, 4 * 4096, 4096)]
    views[0].fill_(1.0)
    states = ChunkStates(grad=views[0], param=views[1], exp_avg=views[2], exp_avg_sq=views[3])
    make_kernel(StatePrecision.BF16).update(states, learning_rate=1e-2, step=1, grad_scale=1.0, decay_numel=0)
    assert views[1].tolist() == pytest.approx([-1e-2] * 64, rel=2**-7)
    assert arena[4096 + 128 : 2 * 4096].eq(0).all()


def test_update_of_empty_chunk_does_nothing(make_kernel: MakeKernel) -> None:
    for states in StatePrecision:
        chunk = random_states(0, states, BF16, BF16, 0)
        make_kernel(states).update(chunk, learning_rate=1e-2, step=1, grad_scale=0.5, decay_numel=0)


def test_other_tensors_are_refused_before_anything_is_written(make_kernel: MakeKernel) -> None:
    kernel = make_kernel(StatePrecision.FP32)
    common = {"learning_rate": 1e-2, "step": 1, "grad_scale": 1.0, "decay_numel": 0}
    right = random_states(64, StatePrecision.FP32, BF16, BF16, 0)
    before = bits_of(copied(right))
    for wrong in (
        {"grad": torch.zeros(64)},
        {"exp_avg": torch.zeros(63)},
        {"exp_avg": torch.zeros(128)[::2]},
        {"exp_avg": torch.zeros(65)[1:]},
        {"param": None},
        {"residual": torch.zeros(64, dtype=torch.int16)},
    ):
        with pytest.raises(WrongStates):
            kernel.update(dataclasses.replace(right, **wrong), **common)
    with pytest.raises(ValueError, match="decay_numel is 65 in a chunk of 64"):
        kernel.update(right, **{**common, "decay_numel": 65})
    assert all(torch.equal(*pair) for pair in zip(before, bits_of(right), strict=True))


def test_states_below_fp32_need_a_model_in_bf16() -> None:
    with pytest.raises(ValueError, match="split states need a model in bf16"):
        OptimizerKernel(ADAMW, grad_dtype=BF16, param_dtype=torch.float16, state_precision=StatePrecision.SPLIT)


def test_without_a_compiler_the_fused_kernel_runs_and_the_log_and_the_job_say_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    announced: list[str] = []
    common = {"grad_dtype": BF16, "param_dtype": BF16, "state_precision": StatePrecision.FP32, "cache_dir": tmp_path}
    with caplog.at_level(logging.WARNING):
        assert OptimizerKernel(ADAMW, announce=announced.append, **common).kernel is Kernel.FUSED
    assert "no-such-compiler is not on the PATH" in caplog.text
    (told,) = announced
    assert told.startswith("Updates run through torch's fused kernel, which is slower: there is no C++ compiler")
    with pytest.raises(KernelUnavailable, match="no-such-compiler"):
        OptimizerKernel(ADAMW, kernel=Kernel.COMPILED, **common)
