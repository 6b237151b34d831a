"""The kernel that an attempt must use, by the commit from which it resumes."""

import json
from dataclasses import replace

import pytest

from tests.support.actors.specs import make_layout, make_spec
from windlass.actors.job.context import JobContext, make_context
from windlass.actors.job.kernel_choice import keeping_kernel
from windlass.storage.ids import Attempt, Kernel, ModelKernel, Rank, Step
from windlass.storage.store.format import CommitRecord


def make_job(kernel: Kernel | None) -> JobContext:
    return make_context(make_spec(training={"kernel": kernel}), make_layout(5000), "/dev/shm/arena")


def commit_of(*kernels: Kernel, **more: list[str]) -> CommitRecord:
    """A commit record as a scheduler writes it."""
    return CommitRecord(
        sequence=3,
        step=Step(2),
        attempt=Attempt(1),
        rank=Rank(0),
        manifest=0,
        manifest_digest=0,
        trainer_state=json.dumps({"kernels": sorted(kernels), "trained_tokens": 7, **more}),
    )


@pytest.mark.parametrize(
    ("asked", "recorded", "expected"),
    [
        (None, [Kernel.FUSED], Kernel.FUSED),
        (None, [Kernel.COMPILED], None),  # the compiled one if available, otherwise the fused one with a warning
        (None, [Kernel.COMPILED, Kernel.FUSED], None),
        (None, [], None),
        (Kernel.COMPILED, [Kernel.FUSED], Kernel.COMPILED),
    ],
)
def test_a_resumed_job_keeps_its_kernel(asked: Kernel | None, recorded: list[Kernel], expected: Kernel | None) -> None:
    before = make_job(asked)
    after = keeping_kernel(before, commit_of(*recorded))
    assert after.spec.training.kernel == expected
    hyper = replace(after.spec.training, kernel=asked, model_kernels=None)
    assert replace(after, spec=replace(after.spec, training=hyper)) == before


@pytest.mark.parametrize("asked", [None, Kernel.FUSED])
def test_new_job_uses_kernel_of_its_settings(asked: Kernel | None) -> None:
    assert keeping_kernel(make_job(asked), None) == make_job(asked)


@pytest.mark.parametrize(
    ("asked", "recorded", "expected"),
    [
        (None, {"model_kernels": ["liger", "flash_attention_2"]}, (ModelKernel.LIGER, ModelKernel.FLASH_ATTENTION_2)),
        (None, {"model_kernels": []}, ()),
        (None, {}, ()),  # a commit of an older version
        ((), {"model_kernels": ["liger"]}, ()),
    ],
)
def test_a_resumed_job_keeps_its_models_kernels(
    asked: tuple[ModelKernel, ...] | None, recorded: dict[str, list[str]], expected: tuple[ModelKernel, ...]
) -> None:
    before = make_context(make_spec(training={"model_kernels": asked}), make_layout(5000), "/dev/shm/arena")
    after = keeping_kernel(before, commit_of(Kernel.COMPILED, **recorded))
    assert after.spec.training.model_kernels == expected
    hyper = replace(after.spec.training, model_kernels=asked)
    assert replace(after, spec=replace(after.spec, training=hyper)) == before
