"""The device memory of an operation is computed before it runs, to the byte."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.engine import odd_models
from tests.support.engine.activation_runs import STEP, MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, NUM_LAYERS, VOCABULARY, make_batch, make_model
from tests.support.engine.odd_models import odd_config
from tests.unit.engine.activations.test_parity import POLICIES, everywhere
from windlass.engine.activations.store import SwapHandle
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.memory_estimate.dry_run import DeviceNeedUnknownError, DryRun, unknown_where
from windlass.engine.memory_estimate.live_storages import LiveStorageTracker
from windlass.engine.memory_plan.activation_policy import RECOMPUTE_ALL, BlockActivations
from windlass.engine.memory_plan.buffer_counts import summed_in_fp32
from windlass.engine.memory_plan.device_moments import Pass, evaluation_moments, step_moments
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.head_slices import LossSums
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import BlockIndex, HeadSlices, Precision

CPU = torch.device("cpu")
ONE, SEVERAL = ((2, 16),), ((2, 16), (1, 9))
CHOICES = {"recompute": RECOMPUTE_ALL} | POLICIES
Where = tuple[Pass, int]


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the way it is trained."""

    name: str
    choice: BlockActivations
    precision: Precision
    shapes: tuple[tuple[int, int], ...]
    is_tied: bool = False
    is_sliced: bool = False  # the head computes a micro-batch in slices
    head_slices: HeadSlices = HeadSlices.LARGE
    cut_matrices: int | None = None

    def config(self) -> object:
        return ARCHITECTURES[self.name].config(tied=self.is_tied, dropout=0.1)

    @property
    def is_summed(self) -> bool:
        return len(self.shapes) > 1

    @property
    def grad_dtype(self) -> torch.dtype:
        return torch.float32 if self.is_summed else TORCH_DTYPE[self.precision]


class AwayStore(MemoryStore):
    """A store whose tensors are not on the device; a prefetched tensor has memory there from the prefetch on."""

    def __init__(self) -> None:
        super().__init__()
        self._back: dict[SwapHandle, torch.Tensor] = {}

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        with _disable_current_modes():
            return super().put(tensor)

    def prefetch(self, handle: SwapHandle) -> None:
        if handle not in self._back:
            self._back[handle] = torch.empty(handle.nbytes, dtype=torch.uint8)

    def get(self, handle: SwapHandle) -> torch.Tensor:
        self.prefetch(handle)
        with _disable_current_modes():
            return self._back.pop(handle).copy_(super().get(handle))

    def drop(self, handle: SwapHandle) -> None:
        self._back.pop(handle, None)
        super().drop(handle)


class Sums(GradBuffer):
    """Sums that are added without memory beside them: a job has `ADDED_NUMEL` elements for that, for all operations."""

    def add(self, name: str, offset: int, grad: torch.Tensor) -> None:
        flat = grad.reshape(-1)
        with _disable_current_modes():
            super().add(name, offset, flat)


def predicted(case: Case) -> dict[Where, int]:
    """The predicted peak of live bytes in each operation of a step."""
    partition = Partition(build_meta_model(case.config(), case.precision))
    rehearsal = DryRun(
        partition,
        everywhere(case.choice),
        grad_dtype=case.grad_dtype,
        is_summed=case.is_summed,
        head_slices=case.head_slices,
        cut_matrices=case.cut_matrices,
    )
    of_shape = {shape: rehearsal.units(*shape) for shape in case.shapes}
    units = [[of_shape[shape][0][block] for shape in case.shapes] for block in range(partition.head)]
    peaks: dict[Where, int] = {}
    for moment, need in step_moments(units, [of_shape[shape][1] for shape in case.shapes], leaving_nbytes=0):
        where = (moment.direction, moment.block)
        # In the store of these tests no write is ever in flight.
        peaks[where] = max(peaks.get(where, 0), need.settled_nbytes)
    return peaks


Watch = Callable[[Where, Callable[[], object]], None]


def go_through(case: Case, watch: Watch, *, num_steps: int) -> None:
    """Runs steps of the real runner on real tensors. `watch` gets each of their operations and calls it."""
    run = Run(
        make_model(case.config(), TORCH_DTYPE[case.precision]),
        activations=everywhere(case.choice),
        store=AwayStore(),
        precision=case.precision,
        head_slices=case.head_slices,
        cut_matrices=case.cut_matrices,
    )
    batch, targets = make_batch(*case.shapes)
    in_fp32 = summed_in_fp32(run.layout.shared, is_sliced=case.is_sliced)
    sums = LossSums.nothing(100, CPU)

    def operation(direction: Pass, block: int, work: Callable[[BlockIndex], object]) -> None:
        # Each operation has its own buffers, as tied uses have in a job.
        for b in run.layout.blocks:
            parts = run.layout.grad_parts(b.index, case.cut_matrices) if case.is_summed else []
            touched = [name for name, *_ in parts]
            dtype = torch.float32 if b.index in in_fp32 else case.grad_dtype
            run.grads[b.index] = Sums(torch.zeros(b.numel, dtype=dtype), touched)
        run.lend(BlockIndex(block), with_grads=direction is not Pass.FORWARD)
        watch((direction, block), lambda: work(BlockIndex(block)))
        run.take_back(BlockIndex(block))

    def compute_head(_: BlockIndex) -> None:
        run.runner.head(STEP, targets, sums=sums)
        sums.terms.clear()  # the worker keeps the losses only until they are on the host

    for _ in range(num_steps):
        for b in range(NUM_LAYERS + 1):
            operation(Pass.FORWARD, b, lambda block: run.runner.forward(block, STEP, batch))
        operation(Pass.HEAD, NUM_LAYERS + 1, compute_head)
        for b in reversed(range(NUM_LAYERS + 1)):
            operation(Pass.BACKWARD, b, lambda block: run.runner.backward(block, STEP, batch))


def followed(case: Case) -> dict[Where, int]:
    """The measured peak of live bytes in each operation of a second step.

    In the first step, layers with Python autograd functions are not known yet.
    """
    peaks: dict[Where, int] = {}
    living = LiveStorageTracker(CPU)

    def watch(where: Where, work: Callable[[], object]) -> None:
        living.begin()
        with living:
            work()
        peaks[where] = living.peak_nbytes

    go_through(case, watch, num_steps=2)
    assert living.nbytes == 0
    return peaks


def assert_known(case: Case) -> None:
    assert predicted(case) == followed(case)


@pytest.mark.short("Qwen2-matrix products swapped, rest kept-bf16")
@pytest.mark.parametrize("precision", [pytest.param(Precision.FP32, marks=pytest.mark.long), Precision.BF16])
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param("Qwen2", "recompute", marks=pytest.mark.long),
        pytest.param("Qwen2", "all kept", marks=pytest.mark.long),
        pytest.param("Qwen2", "all swapped", marks=pytest.mark.long),
        ("Qwen2", "matrix products swapped, rest kept"),
        pytest.param("GPT-2", "input swapped", marks=pytest.mark.long),
        ("GPT-2", "first kept, others swapped"),
        ("Gemma-2", "matrix products kept"),  # layers with different masks
        ("Bloom", "matrix products swapped"),  # its layers have a Python autograd function
    ],
)
def test_each_operation_of_a_step(name: str, choice: str, precision: Precision) -> None:
    assert_known(Case(name=name, choice=CHOICES[choice], precision=precision, shapes=SEVERAL))


@pytest.mark.short("recompute")
@pytest.mark.parametrize(
    "choice", ["recompute", pytest.param("all kept", marks=pytest.mark.long), "matrix products swapped"]
)
def test_a_single_micro_batch(choice: str) -> None:
    assert_known(Case(name="Qwen2", choice=CHOICES[choice], precision=Precision.BF16, shapes=ONE))


@pytest.mark.short("Qwen2-bf16-matrix*")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("name", ["Qwen2", "GPT-2"])
def test_layers_that_compute_in_parts_of_their_matrices(name: str, precision: Precision, choice: str) -> None:
    case = Case(name=name, choice=CHOICES[choice], precision=precision, shapes=SEVERAL)
    cut = replace(case, cut_matrices=500)
    assert_known(cut)
    backward = (Pass.BACKWARD, 1)
    # Without a gradient of a whole matrix beside the sums. In such small layers activations need more than that.
    assert predicted(cut)[backward] <= predicted(case)[backward] + 500 * precision.itemsize


@pytest.mark.long
@pytest.mark.parametrize(
    "precision", [pytest.param(each, marks=[pytest.mark.long] * (each is not Precision.BF16)) for each in Precision]
)
def test_experts_are_known(precision: Precision) -> None:
    assert_known(Case(name="Mixtral", choice=CHOICES["all swapped"], precision=precision, shapes=SEVERAL))


@pytest.mark.long
@pytest.mark.parametrize(
    "shapes", [pytest.param(ONE, marks=pytest.mark.long), SEVERAL], ids=["one micro-batch", "several"]
)
def test_tied_weights(shapes: tuple[tuple[int, int], ...]) -> None:
    assert_known(Case(name="GPT-2", choice=RECOMPUTE_ALL, precision=Precision.BF16, shapes=shapes, is_tied=True))


@pytest.mark.long
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_operation_of_every_architecture(name: str, precision: Precision) -> None:
    for choice in CHOICES.values():
        for shapes in (ONE, SEVERAL):
            assert_known(Case(name=name, choice=choice, precision=precision, shapes=shapes))


@pytest.mark.parametrize(("name", "choice"), [("Qwen2", "all swapped"), ("GPT-2", "recompute")])
def test_an_evaluation(name: str, choice: str) -> None:
    case = Case(name=name, choice=CHOICES[choice], precision=Precision.BF16, shapes=SEVERAL)
    partition = Partition(build_meta_model(case.config(), case.precision))
    rehearsal = DryRun(partition, everywhere(case.choice), grad_dtype=case.grad_dtype, is_summed=True)
    of_shape = {shape: rehearsal.units(*shape, train=False) for shape in case.shapes}
    units = [[of_shape[shape][0][block] for shape in case.shapes] for block in range(partition.head)]
    expected = [0] * partition.num_blocks
    for moment, need in evaluation_moments(units, [of_shape[shape][1] for shape in case.shapes]):
        expected[moment.block] = max(expected[moment.block], need.nbytes)
    run = Run(make_model(case.config(), torch.bfloat16), precision=case.precision)
    run.runner.model.train(False)
    batch, targets = make_batch(*case.shapes)
    sums, living, found = LossSums.nothing(100, CPU), LiveStorageTracker(CPU), []
    for block in range(partition.num_blocks):
        run.lend(BlockIndex(block), with_grads=False)
        living.begin()
        with living:
            if block < partition.head:
                run.runner.forward(BlockIndex(block), STEP, batch, keep=False)
            else:
                run.runner.head(STEP, targets, train=False, sums=sums)
        run.take_back(BlockIndex(block))
        found.append(living.peak_nbytes)
    assert found == expected


def allocated(case: Case) -> dict[Where, int]:
    """The same peaks as from `followed`, by torch's allocator, without a dispatch mode."""
    peaks: dict[Where, int] = {}
    held = 0

    def watch(where: Where, work: Callable[[], object]) -> None:
        nonlocal held
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            work()
        events = profiler.profiler.kineto_results.events()
        sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
        totals = list(itertools.accumulate(sizes, initial=held))
        peaks[where], held = max(totals), totals[-1]

    go_through(case, watch, num_steps=1)
    assert held == 0
    return peaks


@pytest.mark.parametrize(
    ("choice", "cut_matrices"),
    [pytest.param("recompute", None, marks=pytest.mark.long), ("all kept", None), ("recompute", 500)],
)
def test_the_allocator_agrees(choice: str, cut_matrices: int | None) -> None:
    case = Case(
        name="Qwen2", choice=CHOICES[choice], precision=Precision.FP32, shapes=SEVERAL, cut_matrices=cut_matrices
    )
    torch.backends.mkldnn.set_flags(False)  # oneDNN's kernels allocate memory for themselves
    try:
        expected, found = predicted(case), allocated(case)
    finally:
        torch.backends.mkldnn.set_flags(True)
    # Numbers that a kernel gets from Python are small tensors while it runs.
    assert {where: nbytes - expected[where] for where, nbytes in found.items() if nbytes - expected[where] > 32} == {}
    assert all(found[where] >= nbytes for where, nbytes in expected.items())


@pytest.mark.long
@pytest.mark.parametrize("slices", HeadSlices)
@pytest.mark.parametrize(
    "shapes",
    [pytest.param(((5, 48),), marks=pytest.mark.long), ((5, 48), (5, 48))],
    ids=["one micro-batch", "several"],
)
def test_head_with_many_slices_computes_two_in_the_dry_run(
    monkeypatch: pytest.MonkeyPatch, shapes: tuple[tuple[int, int], ...], slices: HeadSlices
) -> None:
    monkeypatch.setattr(slice_sizes, "MAX_LOGITS_NUMEL", 64 * VOCABULARY)
    monkeypatch.setattr(slice_sizes, "MIN_SLICE_TOKENS", 64)
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 64)
    monkeypatch.setattr(slice_sizes, "MAX_PIECE_NUMEL", 20 * VOCABULARY)
    case = Case(name="Llama", choice=RECOMPUTE_ALL, precision=Precision.BF16, shapes=shapes, is_sliced=True)
    expected, found = (measure(replace(case, head_slices=slices)) for measure in (predicted, followed))
    # Each piece of the logits leaves a loss of 4 bytes until the losses are on the host, and the dry run skips most.
    head = (Pass.HEAD, NUM_LAYERS + 1)
    num_pieces = sum(-(-batch * length // 64) * -(-64 // 20) for batch, length in shapes)
    assert 0 <= found.pop(head) - expected.pop(head) <= 4 * num_pieces
    assert found == expected


def test_a_kernel_of_the_models_own_is_not_started() -> None:
    partition = Partition(build_meta_model(odd_config(odd_models.KernelModel), Precision.FP32))
    rehearsal = DryRun(partition, {}, grad_dtype=torch.float32, is_summed=False)
    with pytest.raises(DeviceNeedUnknownError, match=r"block 1 needs is not known .* Cannot access data pointer"):
        rehearsal.units(2, 16)


def test_lack_of_memory_is_no_property_of_a_block() -> None:
    with pytest.raises(MemoryError), unknown_where(1):
        raise MemoryError
    with pytest.raises(RuntimeError, match=r"^can't allocate memory$"), unknown_where(1):
        raise RuntimeError("can't allocate memory")
