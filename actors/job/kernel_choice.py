"""A job that goes on keeps to the kernels that it began with: they differ in the last bits."""

import json
from dataclasses import replace

from windlass.actors.job.context import JobContext
from windlass.storage.ids import Kernel, ModelKernel
from windlass.storage.store import CommitRecord


def keeping_kernel(context: JobContext, commit: CommitRecord | None) -> JobContext:
    """The context of an attempt that goes on from `commit`; None: it begins.

    Of updates: the fused kernel can be had everywhere, so a job that knows no other keeps it, also where a compiler
    came since. One that began with the compiled kernel gets that wherever it can be had; where not, it goes on with the
    fused one, and the scheduler, which knows both, warns of it in the journal.

    Of the model: the same ones, or an error where they cannot be had. Kernels that the job's settings name stay.
    """
    if commit is None:
        return context
    hyper, state = context.spec.hyperparameters, json.loads(commit.trainer_state)
    if hyper.kernel is None and state["kernels"] == [Kernel.FUSED]:
        hyper = replace(hyper, kernel=Kernel.FUSED)
    if hyper.model_kernels is None:
        # Commits of older versions do not say: there were torch's alone.
        hyper = replace(hyper, model_kernels=tuple(map(ModelKernel, state.get("model_kernels", ()))))
    return replace(context, spec=replace(context.spec, hyperparameters=hyper))
