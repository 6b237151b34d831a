"""The GPU check compares runs with the same kernels and sums, and counts reserved memory and the host's waits."""

import dataclasses
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import link as gpu_link
from benchmarks.gpu_check import parity as gpu_parity
from benchmarks.gpu_check import prediction, report
from benchmarks.gpu_check import speed as gpu_speed
from benchmarks.gpu_check.case import ResultsFile, Setting, run_case
from benchmarks.gpu_check.cases import LinkCase, ParityCase, SpeedCase, cases
from benchmarks.gpu_check.compute_alone import head as gpu_head
from benchmarks.gpu_check.compute_alone import peak as gpu_peak
from benchmarks.gpu_check.report import report_lines
from benchmarks.gpu_check.watch import host_waits
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_fp32_product import FakeFp32Product
from tests.support.fake_liger import FakeLiger
from windlass.actors.gpu_worker import kernel_selection
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.amounts import GIB
from windlass.engine.device.cuda_streams import CudaStreams
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.head import Head
from windlass.engine.slices import slice_sizes
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BlockIndex, HeadSlices, Kernel, ModelKernel, Precision


def tiny() -> SpeedCase:
    """The first speed case on a small model."""
    return next(case for case in cases(is_tiny=True) if isinstance(case, SpeedCase))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(root=tmp_path, results=ResultsFile(tmp_path / "check.jsonl"), device="cpu", is_tiny=True)


def only(monkeypatch: pytest.MonkeyPatch, chosen: Callable[[gpu_parity.Variant], bool]) -> None:
    """Lets the parity cases run the chosen variants only."""
    make = gpu_parity.variants
    monkeypatch.setattr(
        gpu_parity,
        "variants",
        lambda precision, *, compiles: [each for each in make(precision, compiles=compiles) if chosen(each)][:1],
    )


@pytest.mark.long
def test_both_sides_of_a_comparison_have_the_same_kernels(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of other packages are used in one variant and its reference, although jobs choose what is installed."""
    liger = FakeLiger()
    liger.install(monkeypatch)
    num_norms: list[tuple[str, bool]] = []
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (ModelKernel.LIGER,))
    monkeypatch.setattr(gpu_parity, "kernels_here", lambda *_: (ModelKernel.LIGER,))
    train, train_plainly = gpu_parity._train, gpu_parity.train_plainly

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            before = liger.num_norms
            result = run(*args, **options)
            num_norms.append((name, liger.num_norms > before))
            return result

        return call

    monkeypatch.setattr(gpu_parity, "_train", counted("windlass", train))
    monkeypatch.setattr(gpu_parity, "train_plainly", counted("plain", train_plainly))
    only(monkeypatch, lambda each: not each.is_streamed)
    result = run_case(ParityCase(Precision.FP32), setting)
    assert [run["reason"] for run in result.measured["runs"]] == ["", ""]
    assert [run["model_kernels"] for run in result.measured["runs"]] == [(), (ModelKernel.LIGER,)]
    assert result.measured["num_wrong"] == 0
    own, others = [("windlass", False), *[("plain", False)] * 3], [("windlass", True), *[("plain", True)] * 3]
    assert num_norms == [*own, *others]
    table = "\n".join(report_lines(setting.results.read(), cases(), Path(), "tiny"))
    assert re.search(r"\| fused +\| liger +\|", table)
    assert re.search(r"\| fused +\| torch's +\|", table)


@pytest.mark.long
def test_a_variant_has_the_kernels_of_the_head_in_slices(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs several micro-batches, because the sums of one need no product in fp32."""
    liger, products = FakeLiger(), FakeFp32Product()
    liger.install(monkeypatch)
    products.install(monkeypatch)
    kernels = (ModelKernel.LIGER, ModelKernel.LIGER_CROSS_ENTROPY, ModelKernel.FP32_PRODUCT)
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: kernels)
    monkeypatch.setattr(gpu_parity, "kernels_here", lambda *_: kernels)
    only(monkeypatch, lambda each: not each.is_streamed)
    result = run_case(ParityCase(Precision.BF16), setting)
    runs = result.measured["runs"]
    assert [run["reason"] for run in runs] == ["", ""]
    assert [(run["model_kernels"], run["is_sliced"]) for run in runs] == [((), False), (kernels, True)]
    assert result.measured["num_wrong"] == 0
    num_of_checks, num_microbatches = 2, 2 * 2  # micro-batches of two steps
    assert products.num_products > num_of_checks + num_microbatches  # because a micro-batch has several slices
    assert liger.num_losses > 2 * num_of_checks + num_microbatches


@pytest.mark.parametrize("precision", [Precision.BF16, pytest.param(Precision.FP32, marks=pytest.mark.long)])
def test_a_variant_of_each_precision_has_a_sliced_head(
    setting: Setting, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, lambda each: each.is_sliced)
    usual = slice_sizes.num_slice_tokens(HeadSlices.LARGE, 128)
    num_slices: Counter[int] = Counter()
    num_parts: set[int] = set()
    head, slice_, split = BlockRunner.head, Head._add_slice, torch.split

    def one_head(runner: BlockRunner, *args: Any, **options: Any) -> Any:
        num_slices[0] += 1
        return head(runner, *args, **options)

    def one_slice(head: Head, *args: Any) -> Any:
        num_slices[1] += 1
        return slice_(head, *args)

    def splitting(tensor: torch.Tensor, size: int, dim: int = 0) -> Any:
        parts = split(tensor, size, dim)
        num_parts.add(len(parts))
        return parts

    monkeypatch.setattr(BlockRunner, "head", one_head)
    monkeypatch.setattr(Head, "_add_slice", one_slice)
    monkeypatch.setattr(torch, "split", splitting)
    result = run_case(ParityCase(precision), setting)
    (run,) = result.measured["runs"]
    assert (run["reason"], run["is_wrong"], run["is_sliced"]) == ("", False, True)
    assert num_slices[1] > num_slices[0] > 0
    assert max(num_parts) > 1  # of a slice's loss, and of its gradient
    assert slice_sizes.num_slice_tokens(HeadSlices.LARGE, 128) == usual
    assert ", head in slices" in "\n".join(report_lines(setting.results.read(), cases(), Path(), "tiny"))


@pytest.mark.long
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_head_is_measured_with_each_of_its_kernels(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    liger, products = FakeLiger(), FakeFp32Product()
    liger.install(monkeypatch)
    products.install(monkeypatch)
    loss, product = ModelKernel.LIGER_CROSS_ENTROPY, ModelKernel.FP32_PRODUCT
    monkeypatch.setattr(gpu_head, "kernels_here", lambda *_: (ModelKernel.LIGER, loss, product))
    if is_broken:
        liger.change_losses = lambda losses: losses.view(1, 1, 1)
    rates = SimpleNamespace(h2d_bytes=1, d2h_bytes=1)
    monkeypatch.setattr(gpu_link, "measure_rates", lambda *_, **__: rates)
    monkeypatch.setattr(gpu_link, "_link", lambda _: {"h2d_gb_per_s": 1.0})
    monkeypatch.setattr(gpu_link, "_hardware", lambda *_: {})
    result = run_case(LinkCase(), setting)
    runs = {run["kernels"]: run for run in result.measured["head"]["runs"]}
    assert list(runs) == [(), (loss,), (product,), (loss, product)]
    assert [kernels for kernels, run in runs.items() if run["reason"]] == [(loss,), (loss, product)] * is_broken
    right = [run for run in runs.values() if not run["reason"]]
    assert [len(run["head_s"]) for run in right] == [3] * len(right)
    assert max(run["grad_difference"] for run in right) < 0.01  # other roundings to bf16
    assert runs[product,]["grad_difference"] > 0.0 == runs[()]["grad_difference"]
    assert products.num_products == (4 if is_broken else 8)
    text = "\n".join(report_lines(setting.results.read(), cases(), Path(), "tiny"))
    assert "The head alone, 64 tokens, vocabulary 128, hidden size 64, bf16:" in text
    cells = r" +\| +\| RuntimeError: " if is_broken else r"\d"
    assert re.search(r"\| liger_cross_entropy, fp32_product +\| " + cells, text)


def test_without_the_usual_head_no_gradient_is_compared(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeFp32Product().install(monkeypatch)
    monkeypatch.setattr(gpu_head, "kernels_here", lambda *_: (ModelKernel.FP32_PRODUCT,))
    gradient, fails = gpu_head._Head.gradient, iter([True, False])

    def gradient_or_error(head: gpu_head._Head) -> torch.Tensor:
        if next(fails):
            raise RuntimeError("out of memory")
        return gradient(head)

    monkeypatch.setattr(gpu_head._Head, "gradient", gradient_or_error)
    found = gpu_head.measure_head(setting)
    usual, other = found["runs"]
    assert "out of memory" in usual["reason"]
    assert (other["reason"], other["grad_difference"], len(other["head_s"])) == ("", None, 3)
    assert "fp32_product" in report._head_lines(found)[-1]


@pytest.mark.long
def test_parity_has_a_budget_so_that_the_worker_limits_the_gpu(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: list[int] = []
    monkeypatch.setattr(gpu_worker, "limit_device_memory", lambda _, nbytes: limited.append(nbytes))
    only(monkeypatch, lambda each: True)
    run_case(ParityCase(Precision.FP32), setting)
    assert limited == [2 * GIB]


@pytest.mark.long
@pytest.mark.parametrize("has_cap", [True, False])
def test_a_speed_case_is_limited_by_its_budget(setting: Setting, has_cap: bool) -> None:
    case = dataclasses.replace(tiny(), has_cap=has_cap)
    room = prediction.Room.of(case, 24 * GIB, 120 * GIB, 200 * GIB)
    plan = prediction.Predictor(case, None).plan(room)
    spec = gpu_speed._spec(plan, room, setting.root / "job", setting, Kernel.FUSED)
    assert spec.device_memory_nbytes == (45 * GIB // 2 if has_cap else None)
    assert spec.planned_device_nbytes == plan.need.nbytes
    assert spec.training.model_kernels == ()


def test_what_a_gpus_allocator_reserves_is_planned() -> None:
    case = tiny()
    room = prediction.Room.of(case, 24 * GIB, 120 * GIB, 200 * GIB)
    predictor = prediction.Predictor(case, None)
    plan = predictor.plan(room)
    assert plan.predicted["gpu_gib"] == plan.need.reserved_nbytes / GIB
    fits_exactly = dataclasses.replace(room, gpu_nbytes=plan.need.reserved_nbytes)
    assert predictor.plan(fits_exactly).need.reserved_nbytes <= plan.need.reserved_nbytes
    with pytest.raises(prediction.NotHereError):  # there is room for tensors, but not for the reserve
        predictor.plan(dataclasses.replace(room, gpu_nbytes=plan.need.nbytes))


def test_reserved_memory_is_compared_with_the_plan_and_its_reserve(setting: Setting) -> None:
    training = object.__new__(gpu_speed._Training)
    need = SimpleNamespace(nbytes=100, reserved_nbytes=150)
    training._planned = SimpleNamespace(need=need)  # type: ignore[assignment]
    training._memory_stats = {"reserved_bytes.all.peak": 120}
    assert training._gpu_memory()["reserved_over_planned"] == 0.8


@pytest.mark.long
def test_compute_only_sums_gradients_as_a_job_does(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: dict[int, set[torch.dtype]] = {}
    converted: list[set[int]] = []
    install, run_pass = BlockRunner.install, gpu_peak._pass

    def note_install(runner: BlockRunner, block: BlockIndex, flats: Any, grads: Any) -> None:
        for each, grad in grads.items():
            dtypes.setdefault(each, set()).add(grad.flat.dtype)
        install(runner, block, flats, grads)

    def note_pass(runner: BlockRunner, flats: Any, grads: Any, leaving: Any, batch: Any) -> Any:
        times = run_pass(runner, flats, grads, leaving, batch)
        converted.append({block for block, grad in leaving.items() if torch.equal(grad, grads[block].bfloat16())})
        return times

    monkeypatch.setattr(BlockRunner, "install", note_install)
    monkeypatch.setattr(gpu_peak, "_pass", note_pass)
    monkeypatch.setattr(slice_sizes, "MIN_SLICE_TOKENS", 64)
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 64)
    case = tiny()

    def peak(num_microbatches: int, batch_size: int) -> None:
        dtypes.clear()
        gpu_peak.peak_step_s(
            case.shape,
            batch_size=batch_size,
            sequence_length=32,
            num_microbatches=num_microbatches,
            activations=ActivationChoice.RECOMPUTE,
            device=torch.device("cpu"),
        )

    bf16, fp32 = {torch.bfloat16}, {torch.float32}
    peak(1, 4)  # of 128 tokens, in two slices
    assert dtypes == {0: bf16, 1: bf16, 2: bf16, 3: fp32}
    assert converted[-1] == {3}
    peak(1, 2)
    assert dtypes == {0: bf16, 1: bf16, 2: bf16, 3: bf16}
    peak(2, 4)
    assert dtypes == {0: fp32, 1: fp32, 2: fp32, 3: fp32}
    assert converted[-1] == set()


def test_waits_for_events_are_counted_outside_of_the_places_that_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    FakeCuda().install(monkeypatch)
    token, is_over = CancelToken(10.0), threading.Event()

    def start(targets: Iterable[Callable[[], None]]) -> None:
        for target in targets:
            threading.Thread(target=target, daemon=True).start()

    with host_waits("cuda") as waits:
        streams = CudaStreams(torch.device("cpu"), token, start)
        streams.compute.record().wait()
        assert waits.number == 0  # it is not on
        waits.turn(on=True)
        streams.compute.then(is_over.set)
        assert is_over.wait(10)
        assert waits.number == 0  # the stream's own thread waits
        streams.compute.record().wait()
    assert waits.number == 1
    ((line, _),) = waits.by_line.items()
    assert re.fullmatch(r"tests/unit/benchmarks/gpu_check/test_gpu_check_sides.py:\d+", line)
    streams.compute.record().wait()
    assert waits.number == 1
    token.cancel()
