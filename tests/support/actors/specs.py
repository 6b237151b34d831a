"""Job specs and layouts for tests that need no model."""

from dataclasses import fields, replace
from typing import Any

from windlass.actors.job.spec import JobSpec
from windlass.engine.model.layout import BlockLayout, ModelLayout, ParamSlice
from windlass.engine.training_config.training_config import Schedule, TrainingConfig
from windlass.storage.ids import Attempt, BlockIndex, JobId, Kernel, Precision

TRAINING = TrainingConfig(
    epochs=1,
    batch_size=8,
    num_microbatches=2,
    sequence_length=64,
    learning_rate=1e-4,
    warmup_steps=2,
    schedule=Schedule.LINEAR,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    clip_norm=None,
    precision=Precision.BF16,
    seed=1,
    kernel=Kernel.FUSED,
    total_steps=10,
)

SPEC = JobSpec(
    job=JobId("ftjob-1"),
    attempt=Attempt(2),
    model_dir="/models/base",
    layout_file="/jobs/1/layout.json",
    dataset_dir="/jobs/1/data",
    job_dir="/jobs/1",
    output_dir="/models/out",
    ssd_dirs=("/ssd0", "/ssd1"),
    training=TRAINING,
    num_cpu_optimizers=2,
    deadline_s=30.0,
)


def make_spec(*, training: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    """A job. `changes`: fields of the spec or, like `training`, of its training config."""
    names = [field.name for field in fields(TrainingConfig)]
    settings = {name: changes.pop(name) for name in names if name in changes}
    return replace(SPEC.with_training(**settings, **(training or {})), **changes)


def make_layout(*numels: int, chunk_numel: int = 2048) -> ModelLayout:
    """A layout whose blocks have one parameter of `numels` elements each; a block of 0 elements has none."""
    blocks = []
    for b, numel in enumerate(numels):
        params = (ParamSlice(name=f"layers.{b}.weight", shape=(numel,), offset=0, numel=numel, decay=True),)
        blocks.append(BlockLayout(index=BlockIndex(b), name=f"layers.{b}", params=params if numel else ()))
    return ModelLayout(
        blocks=tuple(blocks),
        tied={},
        chunk_numel=chunk_numel,
        shared=tuple((BlockIndex(b),) for b in range(len(numels))),
    )
