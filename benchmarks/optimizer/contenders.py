"""The contenders of `benchmarks.optimizer`. Each updates the same number of elements in the same shared memory."""

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.engine.optimizer import ChunkStates, OptimizerKernel
from windlass.engine.optimizer.adam_kernel import AdamSettings, Kernel
from windlass.storage.ids import JobId, Span, StatePrecision
from windlass.storage.memory import ALIGNMENT_NBYTES, Arena

ARENA_DIR = Path("/dev/shm")
SETTINGS = AdamSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, decoupled=True)
LEARNING_RATE = 1e-4
# Bytes of an element in memory: grad, param, residual, master, two moments, and the fp32 gradient that the peers cast
# to.
_LAYOUT = {"grad": 4, "param": 2, "residual": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4, "cast_grad": 4}


class ContenderMissing(RuntimeError):
    """Raised if a contender cannot run on this machine. The text has the reason."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A function that updates a chunk or copies bytes."""

    name: str
    nbytes: int  # read and written by one call, each byte once
    prepare: Callable[[], None]  # called before a round's timed calls: fills in plausible numbers
    run: Callable[[], None]


class Memory:
    """Arrays for one chunk in an arena, in huge pages if possible. All contenders use it in turn."""

    def __init__(self, arena: Arena, numel: int) -> None:
        self.numel = numel
        self._bytes = torch.frombuffer(arena.buffer(Span(0, arena.nbytes)), dtype=torch.uint8)
        self._offsets = dict(zip(_LAYOUT, _offsets(numel), strict=True))

    def view(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns an array of the chunk's elements. Its place does not depend on its type."""
        offset = self._offsets[name]
        return self._bytes[offset : offset + self.numel * dtype.itemsize].view(dtype)

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the memory as a source and a target of equal size."""
        middle = self._bytes.numel() // 2 // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES
        return self._bytes[:middle], self._bytes[middle : 2 * middle]


@contextmanager
def memory_of(numel: int) -> Iterator[Memory]:
    """Creates an arena for a chunk, and removes it afterwards."""
    path = ARENA_DIR / f"windlass-{JobId('benchmark')}-1-{os.getpid()}.arena"
    arena = Arena.create(path, _offsets(numel)[-1] + _padded(_LAYOUT["cast_grad"] * numel))
    try:
        yield Memory(arena, numel)
    finally:
        arena.unlink()
        arena.close()


def fill(tensors: list[torch.Tensor]) -> None:
    """Fills tensors with typical numbers. They are positive, so that they are valid second moments too."""
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            tensor.uniform_(0.01, 1.0)
        else:
            tensor.zero_()


def windlass(memory: Memory, states: StatePrecision, grad_dtype: torch.dtype, cache_dir: Path) -> Contender:
    """Returns the optimizer's kernel on one chunk, half of it with weight decay. It must compile on this machine."""
    kernel = OptimizerKernel(
        SETTINGS,
        grad_dtype=grad_dtype,
        param_dtype=torch.bfloat16,
        state_precision=states,
        kernel=Kernel.COMPILED,
        cache_dir=cache_dir,
    )
    bf16, fp32 = torch.bfloat16, torch.float32
    dtypes = {
        StatePrecision.FP32: {"master": fp32, "exp_avg": fp32, "exp_avg_sq": fp32, "param": bf16},
        StatePrecision.SPLIT: {"param": bf16, "residual": torch.int16, "exp_avg": fp32, "exp_avg_sq": fp32},
        StatePrecision.BF16: {"param": bf16, "exp_avg": bf16, "exp_avg_sq": bf16},
    }[states]
    grad = memory.view("grad", grad_dtype)
    tensors = {name: memory.view(name, dtype) for name, dtype in dtypes.items()}
    chunk = ChunkStates(grad=grad, **tensors)
    # With fp32 states the param is only written, because it is derived from the master.
    written = sum(dtype.itemsize for dtype in dtypes.values())
    read = written - (2 if states is StatePrecision.FP32 else 0)

    def run() -> None:
        kernel.update(
            chunk, learning_rate=LEARNING_RATE, step=10, grad_scale=0.5, decay_numel=memory.numel // 2, seed=1
        )

    return Contender(
        name="windlass",
        nbytes=(grad_dtype.itemsize + read + written) * memory.numel,
        prepare=lambda: fill([grad, *tensors.values()]),
        run=run,
    )


def _peer(
    name: str, memory: Memory, grad_dtype: torch.dtype, update: Callable[[torch.Tensor, list[torch.Tensor]], None]
) -> Contender:
    """Returns a peer on fp32 states.

    It casts the gradient to fp32 first if needed, and the master to the param last.
    """
    grad, param = memory.view("grad", grad_dtype), memory.view("param", torch.bfloat16)
    states = [memory.view(key, torch.float32) for key in ("master", "exp_avg", "exp_avg_sq")]
    cast_grad = memory.view("cast_grad", torch.float32) if grad_dtype is not torch.float32 else grad

    def run() -> None:
        if cast_grad is not grad:
            cast_grad.copy_(grad)
        update(cast_grad, states)
        param.copy_(states[0])

    return Contender(
        name=name,
        nbytes=(grad_dtype.itemsize + 12 + 14) * memory.numel,
        prepare=lambda: fill([grad, *states]),
        run=run,
    )


def torch_fused(memory: Memory, grad_dtype: torch.dtype) -> Contender:
    """Returns torch's fused AdamW with casts, on whole chunks."""

    def update(grad: torch.Tensor, states: list[torch.Tensor]) -> None:
        torch._fused_adamw_(
            [states[0]],
            [grad],
            [states[1]],
            [states[2]],
            [],
            [torch.tensor(10.0)],
            lr=LEARNING_RATE,
            beta1=SETTINGS.beta1,
            beta2=SETTINGS.beta2,
            weight_decay=SETTINGS.weight_decay,
            eps=SETTINGS.epsilon,
            amsgrad=False,
            maximize=False,
        )

    return _peer("torch fused AdamW and casts", memory, grad_dtype, update)


def deepspeed(memory: Memory, grad_dtype: torch.dtype) -> Contender:
    """Returns DeepSpeed's CPUAdam with casts, on whole chunks.

    Raises:
        ContenderMissing: it is not installed, or its operator does not build.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam: Any = DeepSpeedCPUAdam(
            [torch.nn.Parameter(torch.zeros(1))],
            lr=LEARNING_RATE,
            betas=(SETTINGS.beta1, SETTINGS.beta2),
            eps=SETTINGS.epsilon,
            weight_decay=SETTINGS.weight_decay,
            adamw_mode=True,
        )
    except Exception as error:  # many types, if a build dependency is missing
        raise ContenderMissing(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error

    def update(grad: torch.Tensor, states: list[torch.Tensor]) -> None:
        # The same call as in its `step`, for each param.
        adam.ds_opt_adam.adam_update(
            adam.opt_id,
            10,
            LEARNING_RATE,
            SETTINGS.beta1,
            SETTINGS.beta2,
            SETTINGS.epsilon,
            SETTINGS.weight_decay,
            True,
            states[0],
            grad,
            states[1],
            states[2],
        )

    return _peer("DeepSpeed CPUAdam and casts", memory, grad_dtype, update)


def copies(memory: Memory) -> list[Contender]:
    """Returns copies of the same bytes by the same number of threads: by torch, and by a memmove per thread."""
    source, target = memory.halves()
    num_threads = torch.get_num_threads()
    parts = [
        (to.data_ptr(), of.data_ptr(), of.numel())
        for to, of in zip(*map(torch.chunk, (target, source), (num_threads,) * 2), strict=True)
    ]
    pool = ThreadPoolExecutor(num_threads)

    def copy_by_torch() -> None:
        target.copy_(source)

    def copy_by_memmove() -> None:
        list(pool.map(lambda part: ctypes.memmove(*part), parts))

    nbytes = 2 * source.numel()
    return [
        Contender(name=f"memcpy, {by}", nbytes=nbytes, prepare=lambda: None, run=run)
        for by, run in (("by torch", copy_by_torch), ("memmove in threads", copy_by_memmove))
    ]


def _offsets(numel: int) -> list[int]:
    offsets = [0]
    for itemsize in list(_LAYOUT.values())[:-1]:
        offsets.append(offsets[-1] + _padded(itemsize * numel))
    return offsets


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
