"""A job that computes with kernels of other packages: it starts with those that are correct, and keeps using them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cut_off import CutOff
from tests.support.fake_fp32_product import FakeFp32Product
from tests.support.fake_liger import FakeLiger
from tests.support.training import has_direct_io, journal_of, losses_of, make_partition, make_spec, metrics_of
from windlass.actors.gpu_worker import kernel_selection
from windlass.actors.job.context import make_context
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Message, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.optimizer.kernel_cache import KernelUnavailable
from windlass.storage.ids import ActorName, Attempt, ModelKernel, Precision

LIGER, FLASH = ModelKernel.LIGER, ModelKernel.FLASH_ATTENTION_2
LOSS, PRODUCT = ModelKernel.LIGER_CROSS_ENTROPY, ModelKernel.FP32_PRODUCT
NUM_STEPS = 3
CHOSEN = "The device computes with liger"
ABOUT_KERNELS = ("computes with", "computed without", "torch's own")
# A job whose head has products of 16-bit factors, and sums in fp32.
HALF: dict[str, Any] = {"precision": Precision.BF16, "num_microbatches": 2}


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> FakeLiger:
    """A fake Liger, which jobs consider available on this machine's CPU."""
    liger = FakeLiger()
    liger.install(monkeypatch)
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (LIGER,))
    return liger


def job(root: Path, **changes: Any) -> JobSpec:
    usual = {"total_steps": NUM_STEPS, "evaluate_every": None, "num_validation_examples": 0}
    return make_spec(root, **(usual | changes))


def run(spec: JobSpec, **options: Any) -> dict[str, Any]:
    direct = has_direct_io(Path(spec.model_dir))
    return run_local(spec, partition=make_partition(spec), poison_released=True, direct=direct, **options)


def told(spec: JobSpec) -> list[str]:
    messages = (record.message for record in journal_of(spec))
    return [message for message in messages if any(text in message for text in ABOUT_KERNELS)]


@pytest.mark.long
def test_job_uses_kernels_available_on_its_device(tmp_path: Path, liger: FakeLiger) -> None:
    spec = job(tmp_path / "job")
    assert run(spec)["status"] == "succeeded"
    assert told(spec) == [CHOSEN]
    assert liger.num_norms > 0
    plain = job(tmp_path / "plain", model_kernels=())
    liger.num_norms = 0
    assert run(plain)["status"] == "succeeded"
    assert (told(plain), liger.num_norms) == ([], 0)
    assert losses_of(spec) == pytest.approx(losses_of(plain), rel=1e-4)


@pytest.mark.long
def test_wrong_kernels_are_reported_and_not_used(tmp_path: Path, liger: FakeLiger) -> None:
    liger.change_grad = torch.zeros_like
    spec = job(tmp_path / "job")
    assert run(spec)["status"] == "succeeded"
    (text,) = told(spec)
    assert text.startswith(
        "The model is computed with torch's own kernels: with liger a tiny model has other gradients"
    )
    plain = job(tmp_path / "plain", model_kernels=())
    run(plain)
    assert losses_of(spec) == losses_of(plain)


def test_job_uses_kernels_of_the_head(tmp_path: Path, liger: FakeLiger, monkeypatch: pytest.MonkeyPatch) -> None:
    products = FakeFp32Product()
    products.install(monkeypatch)
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (LOSS, PRODUCT))
    evaluated: dict[str, Any] = {"evaluate_every": NUM_STEPS, "num_validation_examples": 4}
    spec = job(tmp_path / "job", **HALF, **evaluated)
    assert run(spec)["status"] == "succeeded"
    assert told(spec) == ["The device computes with liger_cross_entropy and fp32_product"]
    num_checked = 2 + 2  # losses and products; losses also at the model's own vocabulary
    assert liger.num_losses > num_checked + NUM_STEPS * spec.training.num_microbatches  # also in the evaluation
    assert products.num_products == 2 + NUM_STEPS * spec.training.num_microbatches
    plain = job(tmp_path / "plain", model_kernels=(), **HALF, **evaluated)
    assert run(plain)["status"] == "succeeded"
    assert losses_of(spec) == pytest.approx(losses_of(plain), rel=1e-3)
    name = "validation_loss"
    assert metrics_of(spec, name) == pytest.approx(metrics_of(plain, name), rel=1e-3)


@pytest.mark.long
def test_one_wrong_kernel_is_left_out_and_reported(
    tmp_path: Path, liger: FakeLiger, monkeypatch: pytest.MonkeyPatch
) -> None:
    liger.change_losses = torch.zeros_like
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (LIGER, LOSS))
    spec = job(tmp_path / "job")
    assert run(spec)["status"] == "succeeded"
    assert told(spec) == [
        "The model is computed without liger_cross_entropy: Liger's cross-entropy has another loss than PyTorch's",
        CHOSEN,
    ]
    liger.change_losses = lambda losses: losses
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (LIGER,))
    same = job(tmp_path / "same")
    run(same)
    assert losses_of(spec) == losses_of(same)


@pytest.mark.parametrize("passing_alone", [(), (LIGER, LOSS), (LIGER, PRODUCT)], ids=["none", "all", "two of three"])
def test_kernels_that_fail_together_are_not_used(passing_alone: tuple[ModelKernel, ...]) -> None:
    kernels = passing_alone if LOSS in passing_alone else (LIGER, LOSS, PRODUCT)
    announced: list[str] = []

    def check(some: tuple[ModelKernel, ...]) -> None:
        if len(some) > 1 or some[0] not in passing_alone:
            raise KernelUnavailable(" and ".join(some))

    assert kernel_selection._passing(kernels, check, announced.append) == ()
    assert announced == [f"The model is computed with torch's own kernels: {' and '.join(kernels)}"]


@pytest.mark.parametrize(("num_microbatches", "expected"), [(1, (FLASH, LIGER)), (4, (LIGER,))])
def test_flash_attention_is_for_micro_batches_of_several_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_microbatches: int, expected: tuple[ModelKernel, ...]
) -> None:
    spec = job(tmp_path / "job", num_microbatches=num_microbatches)  # of four examples
    partition = make_partition(spec)
    applied: list[object] = []
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (FLASH, LIGER))
    monkeypatch.setattr(kernel_selection, "check_kernels", lambda *_: None)
    monkeypatch.setattr(kernel_selection, "apply_kernels", lambda model, kernels: applied.append(kernels))
    context = make_context(spec, partition.layout, "/dev/shm/arena")
    assert kernel_selection.choose_kernels(context, partition, torch.device("cpu"), print) == expected
    assert applied == [expected]


def cut_off(spec: JobSpec) -> JobSpec:
    """Cuts the first attempt off in its last step. Returns the spec of the second attempt."""

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, UpdateStep) and message.step == NUM_STEPS:
            raise CutOff

    with pytest.raises(CutOff):
        run(spec, on_message=look)
    return dataclasses.replace(spec, attempt=Attempt(2))


@pytest.mark.short("liger")
@pytest.mark.parametrize("kernels", [(), (LIGER,), (LOSS, PRODUCT)], ids=["none", "liger", "head"])
def test_resumed_job_keeps_its_kernels(
    tmp_path: Path, liger: FakeLiger, monkeypatch: pytest.MonkeyPatch, kernels: tuple[ModelKernel, ...]
) -> None:
    """Also if more kernels are available then, because of a package or a new release."""
    FakeFp32Product().install(monkeypatch)
    whole = job(tmp_path / "whole", model_kernels=kernels, **HALF)
    run(whole)
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: kernels)
    again = cut_off(job(tmp_path / "job", **HALF))
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (LIGER, LOSS, PRODUCT))
    assert run(again)["status"] == "succeeded"
    assert told(again) == ["The device computes with " + " and ".join(kernels)] * (2 * bool(kernels))
    assert losses_of(again) == losses_of(whole)


def test_resumed_job_without_its_kernels_fails(tmp_path: Path, liger: FakeLiger) -> None:
    again = cut_off(job(tmp_path / "job"))
    liger.model_types = set()
    with pytest.raises(KernelUnavailable, match="Liger has no kernels for models of type qwen2"):
        run(again)


def test_resumed_job_without_its_product_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another version of PyTorch: results must not change silently."""
    with monkeypatch.context() as products:
        FakeFp32Product().install(products)
        products.setattr(kernel_selection, "kernels_here", lambda *_: (PRODUCT,))
        again = cut_off(job(tmp_path / "job", **HALF))
    with pytest.raises(KernelUnavailable, match="a tiny model with fp32_product failed with NotImplementedError"):
        run(again)
