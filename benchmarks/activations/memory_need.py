"""How much memory a benchmark's job needs for the activations that it swaps. Imports torch, and not Ray."""

from windlass.actors.job import JobSpec
from windlass.engine.data import PreparedDataset
from windlass.engine.memory_estimate.activation_memory import activation_need_of_model
from windlass.engine.memory_plan import ACTIVATION_SLOT_NBYTES, Placement


def room_for_activations(spec: JobSpec, placement: Placement, device: str = "cpu") -> int:
    """Bytes that a job's activations may take at once where they are swapped as the placement says."""
    hyper = spec.hyperparameters
    shapes = PreparedDataset.open(spec.dataset_dir, "train").largest_shapes(hyper.batch_size, hyper.num_microbatches)
    of_group = shapes[: placement.group_size]
    need = activation_need_of_model(spec.model_dir, hyper.precision, placement.activations, of_group, device=device)
    return need.num_slots * ACTIVATION_SLOT_NBYTES
