"""Keeps a resumed job on the kernels that it began with, because kernels differ in the last bits."""

import json
from dataclasses import replace

from windlass.actors.job.context import JobContext
from windlass.storage.ids import Kernel, ModelKernel
from windlass.storage.store import CommitRecord


def keeping_kernel(context: JobContext, commit: CommitRecord | None) -> JobContext:
    """Returns the context of an attempt that resumes from `commit`; without a commit, the unchanged context.

    Update kernel: the fused kernel is available everywhere, so a job that has used only that one keeps it, even if a
    compiler was installed meanwhile. A job that began with the compiled kernel uses it wherever it is available.
    Elsewhere it uses the fused one, and the scheduler writes a warning into the journal.

    Model kernels: those of the commit; the attempt fails if they are not available. Kernels that the job's settings
    name stay.
    """
    if commit is None:
        return context
    training, state = context.spec.training, json.loads(commit.trainer_state)
    if training.kernel is None and state["kernels"] == [Kernel.FUSED]:
        training = replace(training, kernel=Kernel.FUSED)
    if training.model_kernels is None:
        # Commits of older versions have no such key, because only torch's own kernels existed.
        training = replace(training, model_kernels=tuple(map(ModelKernel, state.get("model_kernels", ()))))
    return replace(context, spec=replace(context.spec, training=training))
