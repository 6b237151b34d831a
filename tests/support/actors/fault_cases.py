"""The fault matrix: every message that an actor receives in the middle of an attempt, in every mode that sends it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors.faults import FaultKind
from tests.support.training import make_spec
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.actors.job.context import GPU_WORKER, PARAM_SERVER, SCHEDULER, gpu_worker_name, optimizer_name, ssd_name
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import (
    ActivationIoDone,
    ActorFailed,
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    ChunkIoDone,
    CommitDecided,
    CommitReached,
    CommitStore,
    ComputeBlock,
    ComputeBlocks,
    ComputeProgressed,
    DescribeStatus,
    Event,
    ExportModel,
    ExportProgressed,
    FlushBlock,
    GradOffloaded,
    GradReady,
    GradSlotsReleased,
    KernelChosen,
    LoadModel,
    LoadProgressed,
    MemoryReported,
    Message,
    ModelExported,
    ModelKernelsChosen,
    ModelLoaded,
    OfferParams,
    OfferSpan,
    OfferTaken,
    ParamsArrived,
    ParamsCopied,
    PullSpan,
    ReadActivations,
    ReadChunks,
    RequestParams,
    RestoreStates,
    SkipStep,
    SpanPulled,
    SpansReported,
    StatesRestored,
    StatusDescribed,
    StoreCommitted,
    SumPassed,
    SumTaken,
    UpdateBlock,
    UpdateStep,
    UserMessage,
    WriteActivations,
    WriteChunks,
)
from windlass.engine.memory_plan.activation_policy import RECOMPUTE_ALL, ActivationChoice
from windlass.engine.memory_plan.arena import layout as arena_layout
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.block_runner import BlockRunner
from windlass.storage.ids import ActorName, Precision

# The last of them is committed in every mode, and at least one earlier step too.
NUM_STEPS = 4
SKIPPED_STEP = 3

# The model has five blocks, of which three are layers.
_EVERY_BLOCK = (0, 1, 2, 3, 4)
_SWAPPING = (*ActivationChoice.SWAP.of_layers(1), RECOMPUTE_ALL, *ActivationChoice.RECOMPUTE_SWAP_INPUT.of_layers(1))
_SLOT_NBYTES = 8192  # bytes, of an activation slot: as small as the model, so that the tiers are used
MODES: dict[str, dict[str, Any]] = {
    "active": {},
    "kept": {"clip_norm": 0.5, "num_microbatches": 2},
    "spilled": {"clip_norm": 0.5, "num_microbatches": 2, "placement": Placement(num_host_grad_blocks=1)},
    "host": {"placement": Placement(host_blocks=_EVERY_BLOCK, commit_every=2)},
    "mixed": {"placement": Placement(host_blocks=(1,), device_blocks=(0, 3), commit_every=2)},
    "skipping": {"clip_norm": 0.5},
    "ranks": {"num_ranks": 2, "num_microbatches": 2},
    "swapped": {
        "placement": Placement(
            activations=_SWAPPING, host_activation_nbytes=4 * _SLOT_NBYTES, ssd_activation_nbytes=128 * _SLOT_NBYTES
        )
    },
}
_RANKS = ("ranks",)  # modes with several GPU workers
_ALONE = tuple(mode for mode in MODES if mode not in _RANKS)
# modes in which the only GPU worker reads params from SSDs
_FROM_SSDS = ("active", "kept", "spilled", "mixed", "skipping", "swapped")
_WITH_PARAM_SLOTS = tuple(mode for mode in _FROM_SSDS if mode != "mixed")  # modes in which not all params stay
_RESTING = ("host", "mixed")

OPTIMIZER = optimizer_name(0)
SSDS = (ssd_name(0), ssd_name(1))
_SECOND = gpu_worker_name(1)  # goes on with the sums of the first one


@dataclass(frozen=True, kw_only=True)
class Row:
    """A type of message and who takes it."""

    message: type[Message]
    to: tuple[ActorName, ...]
    modes: tuple[str, ...] = tuple(MODES)
    in_thread: bool = False  # a thread of the receiver handles it; otherwise it is handled on arrival
    thread: str = ""  # one of several threads of the receiver that handle it; the row is about faults in that thread
    is_call: bool = False  # a call within the receiver's process, which can only break
    is_awaited: bool = True  # losing it is noticed; otherwise the receiver can proceed without it

    def awaits(self, message: Message) -> bool:
        """True if losing this one is noticed.

        Without the word of a GPU worker that it needs no params, their slots only stay in use.
        """
        return self.is_awaited and not (isinstance(message, RequestParams) and not message.keys)


ROWS = (
    Row(message=ReadChunks, to=SSDS, in_thread=True),
    Row(message=WriteChunks, to=SSDS, in_thread=True),
    Row(message=CommitStore, to=SSDS, in_thread=True),
    Row(message=CommitDecided, to=SSDS),
    Row(message=WriteActivations, to=SSDS, modes=("swapped",), in_thread=True),
    Row(message=ReadActivations, to=SSDS, modes=("swapped",), in_thread=True),
    Row(message=ComputeBlock, to=(GPU_WORKER,)),
    Row(message=ComputeBlock, to=(GPU_WORKER,), thread="ParamFeed._run_requests"),
    Row(message=ComputeBlock, to=(GPU_WORKER,), thread="GpuWorker._run_compute"),
    Row(message=ComputeBlock, to=(GPU_WORKER,), thread="GradOffload._run"),
    Row(message=ComputeBlock, to=(_SECOND,), modes=_RANKS),
    Row(message=ComputeBlock, to=(_SECOND,), modes=_RANKS, thread="ParamFeed._run_requests"),
    Row(message=ComputeBlock, to=(_SECOND,), modes=_RANKS, thread="GpuWorker._run_compute"),
    Row(message=ComputeBlock, to=(_SECOND,), modes=_RANKS, thread="PartialGrads.run"),
    Row(message=RequestParams, to=(GPU_WORKER,), modes=_FROM_SSDS, is_call=True),
    Row(message=RequestParams, to=(PARAM_SERVER,), modes=_RANKS),
    Row(message=ParamsArrived, to=(GPU_WORKER,), modes=_FROM_SSDS, is_call=True),
    Row(message=ParamsArrived, to=(GPU_WORKER, _SECOND), modes=_RANKS),
    Row(message=ParamsCopied, to=(GPU_WORKER,), modes=_WITH_PARAM_SLOTS, is_call=True),
    Row(message=ParamsCopied, to=(PARAM_SERVER,), modes=_RANKS, is_awaited=False),
    Row(message=SumPassed, to=(_SECOND,), modes=_RANKS),
    Row(message=SumTaken, to=(GPU_WORKER,), modes=_RANKS, is_awaited=False),
    Row(message=UpdateStep, to=(GPU_WORKER,), modes=("mixed",)),
    Row(message=FlushBlock, to=(GPU_WORKER,), modes=("mixed",), in_thread=True),
    Row(message=RestoreStates, to=(GPU_WORKER,), modes=("mixed",), in_thread=True),
    Row(message=ChunkIoDone, to=(GPU_WORKER,), modes=_FROM_SSDS),
    Row(message=ChunkIoDone, to=(PARAM_SERVER,), modes=_RANKS),
    Row(message=ActivationIoDone, to=(GPU_WORKER,), modes=("swapped",)),
    Row(message=GradSlotsReleased, to=(GPU_WORKER,), modes=_ALONE, is_awaited=False),
    Row(message=GradSlotsReleased, to=(_SECOND,), modes=_RANKS, is_awaited=False),
    Row(message=CommitReached, to=(GPU_WORKER,), modes=("spilled",)),
    Row(message=LoadModel, to=(OPTIMIZER,)),
    Row(message=GradOffloaded, to=(OPTIMIZER,)),
    Row(message=UpdateStep, to=(OPTIMIZER,)),
    Row(message=SkipStep, to=(OPTIMIZER,), modes=("skipping",), is_awaited=False),
    Row(message=FlushBlock, to=(OPTIMIZER,), modes=_RESTING, in_thread=True),
    Row(message=RestoreStates, to=(OPTIMIZER,), modes=_RESTING, in_thread=True),
    Row(message=ExportModel, to=(OPTIMIZER,), in_thread=True),
    Row(message=ChunkIoDone, to=(OPTIMIZER,)),
    Row(message=ModelLoaded, to=(SCHEDULER,)),
    Row(message=StatesRestored, to=(SCHEDULER,), modes=_RESTING),
    Row(message=BlockComputed, to=(SCHEDULER,)),
    Row(message=GradReady, to=(SCHEDULER,)),
    Row(message=BlockUpdated, to=(SCHEDULER,)),
    Row(message=BlockFlushed, to=(SCHEDULER,), modes=_RESTING),
    Row(message=StoreCommitted, to=(SCHEDULER,)),
    Row(message=ModelExported, to=(SCHEDULER,)),
    Row(message=KernelChosen, to=(SCHEDULER,), is_awaited=False),
    Row(message=ModelKernelsChosen, to=(SCHEDULER,), modes=_RANKS, is_awaited=False),
    Row(message=LoadProgressed, to=(SCHEDULER,), is_awaited=False),
    Row(message=ExportProgressed, to=(SCHEDULER,), is_awaited=False),
    Row(message=SpansReported, to=(SCHEDULER,), is_awaited=False),
    Row(message=MemoryReported, to=(SCHEDULER,), is_awaited=False),
)
# The reports of a fault itself; base classes; carriers of messages that have cases; an
# optimizer's own task, which is not sent; messages between boxes, whose faults are in `test_faults_over_boxes.py`.
WITHOUT_CASES = {
    Event,
    UserMessage,
    ActorFailed,
    DescribeStatus,
    StatusDescribed,
    ComputeBlocks,
    ComputeProgressed,
    UpdateBlock,
    OfferParams,
    OfferSpan,
    OfferTaken,
    PullSpan,
    SpanPulled,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the matrix."""

    mode: str
    row: Row
    to: ActorName
    kind: FaultKind
    moment: float  # 0: the first such message of the attempt, 1: the last

    def __str__(self) -> str:
        where = {0.0: "first ", 0.5: "", 0.9: "late "}[self.moment]
        thread = f" {self.row.thread}" if self.row.thread else ""
        return f"{self.mode}: {self.to}{thread} {self.kind} {where}{self.row.message.__name__}"

    def nth(self, count: int) -> int:
        """The number, from 1, of the message to hit if `count` of them are sent."""
        return 1 + int(self.moment * (count - 1))


def kinds_of(row: Row) -> list[FaultKind]:
    """The faults that can happen at a message."""
    if row.to == (SCHEDULER,):  # in one process, nothing can see the scheduler itself die or hang
        return [FaultKind.LOST, FaultKind.LATE]
    if row.is_call:
        return [FaultKind.BREAKS]
    in_thread = {FaultKind.BREAKS_THREAD, FaultKind.HANGS_THREAD}
    if row.thread:
        return [kind for kind in FaultKind if kind in in_thread]
    return [kind for kind in FaultKind if row.in_thread or kind not in in_thread]


def full_product() -> list[Case]:
    """Every mode, message and kind of fault in the middle of an attempt.

    The last mode of each row has other moments too.
    """
    return [
        Case(mode=mode, row=row, to=to, kind=kind, moment=moment)
        for row in ROWS
        for mode in row.modes
        for to in row.to
        for kind in kinds_of(row)
        for moment in ((0.0, 0.5, 0.9) if mode == row.modes[-1] else (0.5,))
    ]


def quick_cases() -> list[Case]:
    """One case for each awaited message; kinds of faults, modes and SSDs take turns."""
    kinds = cycle(FaultKind)
    modes, ssds = cycle(MODES), cycle(SSDS)
    return [
        Case(
            mode=next(mode for mode in modes if mode in row.modes),
            row=row,
            to=next(ssds) if row.to == SSDS else row.to[0],
            kind=next(kind for kind in kinds if kind in kinds_of(row)),
            moment=0.5,
        )
        for row in ROWS
        if row.is_awaited
    ]


def spec_of(root: Path, mode: str, deadline_s: float) -> JobSpec:
    """A job of four steps."""
    return make_spec(
        root,
        precision=Precision.BF16,
        total_steps=NUM_STEPS,
        evaluate_every=2,
        deadline_s=deadline_s,
        **MODES[mode],
    )


@contextmanager
def conditions_of(mode: str) -> Iterator[None]:
    """Applies the patches that a mode needs beside its job spec.

    They make the gradients of one step infinite, or the activation slots as small as the model.
    """
    with pytest.MonkeyPatch.context() as patch:
        if mode == "skipping":
            patch.setattr(BlockRunner, "head", _overflowing(BlockRunner.head))
        if mode == "swapped":
            patch.setattr(arena_layout, "ACTIVATION_SLOT_NBYTES", _SLOT_NBYTES)
            patch.setattr(gpu_worker, "check_architecture", lambda *_: None)  # not under test here, and slow
        yield


def _overflowing(head: Callable[..., Any]) -> Callable[..., Any]:
    def overflows(self: BlockRunner, step: int, *arguments: Any, loss_scale: float = 1.0, **options: Any) -> Any:
        return head(self, step, *arguments, loss_scale=math.inf if step == SKIPPED_STEP else loss_scale, **options)

    return overflows
