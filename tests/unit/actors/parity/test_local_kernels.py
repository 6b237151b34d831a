"""A job that computes with kernels of other packages: it starts with those that are correct, and keeps using them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cut_off import CutOff
from tests.support.fake_liger import FakeLiger
from tests.support.training import has_direct_io, journal_of, losses_of, make_partition, make_spec
from windlass.actors.gpu_worker import kernel_selection
from windlass.actors.job.context import make_context
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Message, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.optimizer.kernel_cache import KernelUnavailable
from windlass.storage.ids import ActorName, Attempt, ModelKernel

LIGER, FLASH = ModelKernel.LIGER, ModelKernel.FLASH_ATTENTION_2
NUM_STEPS = 3
CHOSEN = "The device computes with liger"


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> FakeLiger:
    """A fake Liger, which jobs consider available on this machine's CPU."""
    liger = FakeLiger()
    liger.install(monkeypatch)
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (LIGER,))
    return liger


def job(root: Path, **changes: Any) -> JobSpec:
    return make_spec(root, total_steps=NUM_STEPS, evaluate_every=None, num_validation_examples=0, **changes)


def run(spec: JobSpec, **options: Any) -> dict[str, Any]:
    direct = has_direct_io(Path(spec.model_dir))
    return run_local(spec, partition=make_partition(spec), poison_released=True, direct=direct, **options)


def told(spec: JobSpec) -> list[str]:
    messages = (record.message for record in journal_of(spec))
    return [message for message in messages if "computes with" in message or "torch's own" in message]


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


@pytest.mark.parametrize("begins_with_liger", [True, False])
def test_resumed_job_keeps_its_kernels(
    tmp_path: Path, liger: FakeLiger, monkeypatch: pytest.MonkeyPatch, begins_with_liger: bool
) -> None:
    """Also if a package was installed or removed in between."""
    whole = job(tmp_path / "whole", model_kernels=None if begins_with_liger else ())
    run(whole)
    there: tuple[ModelKernel, ...] = (LIGER,) if begins_with_liger else ()
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: there)
    again = cut_off(job(tmp_path / "job"))
    monkeypatch.setattr(kernel_selection, "kernels_here", lambda *_: (LIGER,))
    assert run(again)["status"] == "succeeded"
    assert told(again) == [CHOSEN] * (2 * begins_with_liger)
    assert losses_of(again) == losses_of(whole)


def test_resumed_job_without_its_kernels_fails(tmp_path: Path, liger: FakeLiger) -> None:
    again = cut_off(job(tmp_path / "job"))
    liger.model_types = set()
    with pytest.raises(KernelUnavailable, match="Liger has no kernels for models of type qwen2"):
        run(again)
