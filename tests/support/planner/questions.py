"""Questions of jobs that do not exist yet, on machines that are only described."""

from dataclasses import fields
from typing import Any

from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.model_shape import ModelShape, published_models
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.hardware.yaml_files import load
from windlass.planner.planning import planner as planning
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport

SHAPE = ModelShape(
    num_layers=24, hidden_size=2048, num_heads=16, num_kv_heads=4, intermediate_size=5632, vocab_size=32000
)
MACHINE = load(Hardware, example_machines()["rtx4090-server"])


def machine(**memory_gib: float) -> Hardware:
    """The example machine with less memory: `host`, `gpus` in GiB, `ssds` each."""
    changes = {}
    for part, gib in memory_gib.items():
        key = "capacity_gib" if part == "ssds" else "memory_gib"
        changes[part] = getattr(MACHINE, part).model_copy(update={key: gib})
    return MACHINE.model_copy(update=changes)


def question(hardware: Hardware = MACHINE, **changes: Any) -> PlanQuestion:
    """A question. `changes`: its fields or those of its training config.

    Without a number of micro-batches, the planner chooses one.
    """
    names = [field.name for field in fields(TrainingConfig)]
    settings: dict[str, Any] = {"batch_size": 8, "sequence_length": 512, "total_steps": 1}
    settings |= {name: changes.pop(name) for name in names if name in changes}
    options = {"config": ShapeConfig(shape=SHAPE, num_tokens=512), **changes}
    chooses = "num_microbatches" not in settings
    return PlanQuestion(hardware=hardware, training=TrainingConfig(**settings), chooses_microbatches=chooses, **options)


def answer(asked: PlanQuestion) -> PlanReport:
    return planning.answer(asked).report


def on_a_desktop(model: str, desktop: str, **training: Any) -> PlanQuestion:
    """The question for 1024 tokens an example, with everything left to the planner."""
    config = ShapeConfig(shape=load(ModelShape, published_models()[model]), num_tokens=1024)
    told = {"sequence_length": 1024, "chooses_order": True, "chooses_cut": True, "kept_shapes": KeptShapes()}
    return question(machine_of(desktop), config=config, **told, **training)
