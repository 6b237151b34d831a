"""The kernel compiled in the process gives the bits of the one compiled ahead of time."""

import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.engine.adam_reference import ADAMW, random_states
from windlass.engine.optimizer import device_kernel
from windlass.engine.optimizer.adam_formulas import Format
from windlass.engine.optimizer.adam_kernel import ChunkStates, Kernel, OptimizerKernel
from windlass.engine.optimizer.device_kernel import compile_here
from windlass.engine.optimizer.kernel_cache import KernelUnavailable
from windlass.storage.ids import StatePrecision
from windlass.storage.memory.capacity import may_find_room_later

BF16 = torch.bfloat16
CPU = torch.device("cpu")
FORMAT = Format(grad=BF16, param=BF16, states=StatePrecision.FP32, decoupled=True)
TORCH_WARNS_OF_ITSELF = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
# (elements, elements with weight decay): even, odd, shorter than a vector, unaligned.
CHUNKS = [(300_000, 300_000), (70_001, 1234), (3, 1), (9, 9), (4099, 4001)]


def make_kernel(states: StatePrecision, cache_dir: Path | None, device: torch.device) -> OptimizerKernel:
    return OptimizerKernel(
        ADAMW,
        grad_dtype=BF16,
        param_dtype=BF16,
        state_precision=states,
        kernel=Kernel.COMPILED,
        cache_dir=cache_dir,
        device=device,
    )


def in_arena(states: ChunkStates, device: torch.device) -> ChunkStates:
    """Copies of the states side by side in one memory area, as in a slot."""
    held = {field.name: getattr(states, field.name) for field in dataclasses.fields(states)}
    held = {name: state for name, state in held.items() if state is not None}
    arena = torch.zeros(sum(state.nbytes + 8 for state in held.values()), dtype=torch.uint8, device=device)
    offset, views = 0, {}
    for name, state in held.items():
        views[name] = arena[offset : offset + state.nbytes].view(state.dtype)
        views[name].copy_(state)
        offset += -(-state.nbytes // 8) * 8
    return ChunkStates(**views)


def updated(kernel: OptimizerKernel, states: ChunkStates, decay_numel: int) -> dict[str, torch.Tensor]:
    """The bits of the states after two steps."""
    chunk = in_arena(states, kernel.device)
    common = {"learning_rate": 1e-2, "grad_scale": 0.37, "decay_numel": decay_numel, "seed": 5}
    for step in (3, 4):
        kernel.update(chunk, step=step, position=1 << 20, **common)
    fields = {field.name: getattr(chunk, field.name) for field in dataclasses.fields(chunk)}
    return {name: state.view(torch.uint8).cpu() for name, state in fields.items() if state is not None}


def with_hard_numbers(states: ChunkStates) -> ChunkStates:
    """Sets some elements to denormal moments, zeros and gradients that overflow."""
    for place, value in enumerate((0.0, 1e-41, 1e-38, 1e30)):
        if place < states.exp_avg_sq.numel():
            states.exp_avg_sq[place] = value
            states.grad[place] = (0.0, 1e-20, 1e-39, float("inf"))[place]
    return states


def check(ours: OptimizerKernel, theirs: OptimizerKernel, states: StatePrecision) -> None:
    for numel, decay_numel in CHUNKS:
        chunk = with_hard_numbers(random_states(numel, states, BF16, BF16, numel))
        wanted = updated(theirs, chunk, decay_numel)
        for name, bits in updated(ours, chunk, decay_numel).items():
            assert torch.equal(bits, wanted[name]), f"{name} of {numel} elements"


@pytest.mark.long
@TORCH_WARNS_OF_ITSELF
@pytest.mark.parametrize("states", list(StatePrecision))
def test_it_gives_the_bits_of_the_kernel_compiled_ahead_of_time(
    kernel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: StatePrecision
) -> None:
    """As on a GPU, except for Triton's part."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    here, ahead = make_kernel(states, kernel_dir, CPU), make_kernel(states, kernel_dir, CPU)
    here._run = compile_here(here.format, CPU, None)
    check(here, ahead, states)


@pytest.mark.gpu
@TORCH_WARNS_OF_ITSELF
@pytest.mark.parametrize("states", list(StatePrecision))
def test_a_gpu_gives_the_bits_of_a_cpu(
    kernel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: StatePrecision
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check(make_kernel(states, None, torch.device("cuda")), make_kernel(states, kernel_dir, CPU), states)


@pytest.mark.gpu
@TORCH_WARNS_OF_ITSELF
def test_an_update_does_not_wait_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    kernel = make_kernel(StatePrecision.BF16, None, torch.device("cuda"))
    chunk = in_arena(random_states(4096, StatePrecision.BF16, BF16, BF16, 0), torch.device("cuda"))
    common = {"learning_rate": 1e-2, "grad_scale": 1.0, "decay_numel": 77}
    kernel.update(chunk, step=1, **common)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.update(chunk, step=2, **common)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def break_compiler(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    def broken(*_: object, **__: object) -> Callable[..., None]:
        def run(*_: torch.Tensor) -> None:
            raise RuntimeError("no Triton here") from cause

        return run

    monkeypatch.setattr(torch, "compile", broken)


def test_what_the_compiler_cannot_do_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compiler(monkeypatch, ImportError("triton"))
    with pytest.raises(KernelUnavailable, match="compiling the optimizer kernel for cpu failed: no Triton here"):
        compile_here(FORMAT, CPU, None)


def test_a_full_disk_is_no_lack_of_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    break_compiler(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="no room to compile the optimizer kernel for cpu") as raised:
        compile_here(FORMAT, CPU, None)
    assert may_find_room_later(raised.value, attempt=1)


def test_views_of_one_slot_become_storages_of_their_own() -> None:
    arena = torch.zeros(64, dtype=torch.uint8)
    first, second = (device_kernel._alone(arena[start:].view(torch.int64)) for start in (0, 32))
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    second.fill_(-1)
    assert (second.data_ptr(), second.storage_offset()) == (arena.data_ptr() + 32, 0)
    assert arena.tolist() == [0] * 32 + [255] * 32
