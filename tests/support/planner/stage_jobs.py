"""Small jobs and machines on which plans over boxes are tested."""

from dataclasses import replace
from functools import cache
from typing import Any

from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.cost.activation_options import ActivationOption, ways_of_layer
from windlass.planner.cost.model_profile import LayerProfile
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.hardware.yaml_files import load
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.stages.box_plans import BoxKind, BoxPlans

SHAPE = ModelShape(num_layers=6, hidden_size=512, num_heads=8, num_kv_heads=8, vocab_size=1000, intermediate_size=1536)
NUM_TOKENS = 128
_SHAPES = KeptShapes()  # so that each model is profiled once


@cache
def server() -> Hardware:
    """Returns Ratel's server with a network of 1 GB/s."""
    return with_part(load(Hardware, example_machines()["rtx4090-server"]), network_gb_per_s=1.0)


def few_ways(layer: LayerProfile) -> tuple[ActivationOption, ...]:
    """Returns two options for activations, so that programs are solved quickly."""
    return ways_of_layer(layer)[:2]


def question_on(hardware: Hardware, *, shape: ModelShape = SHAPE, **changes: Any) -> PlanQuestion:
    """Returns a job of eight micro-batches on a machine."""
    training = TrainingConfig(batch_size=8, num_microbatches=8, sequence_length=NUM_TOKENS, total_steps=1)
    question = PlanQuestion(
        config=ShapeConfig(shape=shape, num_tokens=NUM_TOKENS),
        hardware=hardware,
        training=training,
        kept_shapes=_SHAPES,
        ways=few_ways,
    )
    return replace(question, **changes)


def kind_of(hardware: Hardware, number: int, *, name: str = "a", **changes: Any) -> BoxKind:
    """Returns some equal boxes."""
    return BoxKind(name=name, number=number, question=question_on(hardware, **changes))


def box_plans(kind: BoxKind) -> BoxPlans:
    """Returns the plans of a box of this kind."""
    return BoxPlans(kind=kind, profiles=Profiles(kind.question))
