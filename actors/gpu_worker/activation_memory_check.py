"""Reads a plan's choices for activations, and checks that it has enough slots for them."""

from collections.abc import Sequence

from windlass.actors.job import JobContext
from windlass.amounts import bytes_text
from windlass.engine.activations import ActivationMemoryError
from windlass.engine.memory_estimate import activation_need
from windlass.engine.memory_plan import EVERY_OPERATOR, RECOMPUTE_ALL, BlockActivations
from windlass.engine.model import BlockRunner
from windlass.storage.ids import BlockIndex


def layer_activations(context: JobContext) -> dict[BlockIndex, BlockActivations]:
    """Returns the plan's choice for each layer, by block. The first layer is block 1, after the embedding."""
    return {BlockIndex(i): choice for i, choice in enumerate(context.plan.layer_activations, start=1)}


def require_activation_room(context: JobContext, runner: BlockRunner, shapes: Sequence[tuple[int, int]]) -> None:
    """Checks that the plan has enough activation slots for a step.

    `shapes` are the largest (examples, tokens) of the micro-batches whose activations are held at once.

    Raises:
        ActivationMemoryError: the plan has too few slots; the text names the settings and their smallest values.
        ActivationNeedUnknownError: the need cannot be found without computing the model.
    """
    plan, placement = context.plan, context.spec.placement
    slot_nbytes = plan.activations.slot_nbytes
    choices = [
        choice if context.layout.is_own(block) else RECOMPUTE_ALL
        for block, choice in enumerate(plan.layer_activations, start=1)
    ]
    need = activation_need(runner, choices, [*shapes] * context.num_groups_in_flight, slot_nbytes)
    num_slots = plan.num_host_activations + plan.num_ssd_activations
    if need.num_slots > num_slots:
        raise ActivationMemoryError(
            f"a step may swap {bytes_text(need.nbytes)} of activations at once, which take {need.num_slots} slots of "
            f"{bytes_text(slot_nbytes)}, and the plan has {num_slots}; give host_activation_nbytes (now "
            f"{placement.host_activation_nbytes}) and ssd_activation_nbytes (now "
            f"{placement.ssd_activation_nbytes}) of the placement together at least "
            f"{need.num_slots * slot_nbytes}, or let fewer layers swap"
        )


def unknown_operators(context: JobContext, runner: BlockRunner, shape: tuple[int, int]) -> dict[BlockIndex, list[str]]:
    """Returns operators in the plan's choices that the layers do not call, for example on another kind of device.

    Their results are recomputed instead. Of layers with the same choice, only the first is checked. `shape` is that of
    a micro-batch.
    """
    unknown: dict[BlockIndex, list[str]] = {}
    choices: dict[BlockActivations, BlockIndex] = {}
    for block, choice in layer_activations(context).items():
        choices.setdefault(choice, block)
    for choice, block in choices.items():
        if not (names := (choice.kept | choice.swapped) - {EVERY_OPERATOR}):
            continue
        try:
            called = {operator.name for operator in runner.operators(block, *shape).operators}
        except Exception:  # noqa: BLE001  # a model may fail in any way on tensors without data
            continue
        called |= {name.partition("#")[0] for name in called}
        if missing := sorted(names - called):
            unknown[block] = missing
    return unknown
