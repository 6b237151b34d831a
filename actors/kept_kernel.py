"""A job that goes on keeps to the update kernel that it began with: kernels differ in the last bit."""

import json
from dataclasses import replace

from windlass.actors.context import JobContext
from windlass.storage.ids import Kernel
from windlass.storage.store_format import CommitRecord


def keeping_kernel(context: JobContext, commit: CommitRecord | None) -> JobContext:
    """The context of an attempt that goes on from `commit`; None: it begins.

    The fused kernel can be had everywhere, so a job that knows no other keeps it, also where a compiler came since. One
    that began with the compiled kernel gets that wherever it can be had; where not, it goes on with the fused one, and
    the scheduler, which knows both, warns of it in the journal. A kernel that the job's settings name stays.
    """
    hyper = context.spec.hyperparameters
    if commit is None or hyper.kernel is not None:
        return context
    if json.loads(commit.trainer_state)["kernels"] != [Kernel.FUSED]:
        return context
    return replace(context, spec=replace(context.spec, hyperparameters=replace(hyper, kernel=Kernel.FUSED)))
