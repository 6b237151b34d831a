"""What a plan says of activations, and whether it has room for them."""

from collections.abc import Sequence

from windlass.actors.job import JobContext
from windlass.amounts import bytes_text
from windlass.engine.activations import ActivationMemoryError
from windlass.engine.memory_estimate import activation_need
from windlass.engine.memory_plan import EVERY_OPERATOR, BlockActivations
from windlass.engine.model import BlockRunner
from windlass.storage.ids import BlockIndex


def layer_activations(context: JobContext) -> dict[BlockIndex, BlockActivations]:
    """The plan's choice for each layer, by its block: the embedding comes before the first."""
    return {BlockIndex(i): choice for i, choice in enumerate(context.plan.layer_activations, start=1)}


def require_activation_room(context: JobContext, runner: BlockRunner, shapes: Sequence[tuple[int, int]]) -> None:
    """Compares what a step may need with what the plan has.

    `shapes`: the largest (examples, tokens) of the micro-batches whose activations are held at once.

    Raises:
        ActivationMemoryError: the plan has too little; the text names the settings and the least that they need.
        ActivationNeedUnknownError: what is needed shows only when it is computed.
    """
    plan, placement = context.plan, context.spec.placement
    slot_nbytes = plan.activations.slot_nbytes
    need = activation_need(runner, plan.layer_activations, shapes, slot_nbytes)
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
    """Operators that the plan holds and layers do not call here, as on another device: they are computed again.

    Of layers with the same choice the first is looked at. `shape`: of a micro-batch.
    """
    found: dict[BlockIndex, list[str]] = {}
    choices: dict[BlockActivations, BlockIndex] = {}
    for block, choice in layer_activations(context).items():
        choices.setdefault(choice, block)
    for choice, block in choices.items():
        if not (names := (choice.kept | choice.swapped) - {EVERY_OPERATOR}):
            continue
        try:
            called = {operator.name for operator in runner.operators(block, *shape).operators}
        except Exception:  # noqa: BLE001  # whatever a model does with tensors that have no contents
            continue
        called |= {name.partition("#")[0] for name in called}
        if missing := sorted(names - called):
            found[block] = missing
    return found
