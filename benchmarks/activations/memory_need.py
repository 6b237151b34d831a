"""How much memory a benchmark's job needs for the activations that it swaps. Imports torch, and not Ray."""

from collections.abc import Sequence
from pathlib import Path

import torch

from windlass.actors.job import JobSpec
from windlass.engine.data import PreparedDataset
from windlass.engine.memory_estimate.activation_memory import ActivationNeed, activation_need
from windlass.engine.memory_plan import ACTIVATION_SLOT_NBYTES, BlockActivations, Placement
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.partition import partition_folder
from windlass.storage.ids import Precision


def room_for_activations(spec: JobSpec, placement: Placement, device: str = "cpu") -> int:
    """Bytes that a job's activations may take at once where they are swapped as the placement says."""
    hyper = spec.hyperparameters
    shapes = PreparedDataset.open(spec.dataset_dir, "train").largest_shapes(hyper.batch_size, hyper.num_microbatches)
    of_group = shapes[: placement.group_size]
    need = activation_need_of_model(spec.model_dir, hyper.precision, placement.activations, of_group, device=device)
    return need.num_slots * ACTIVATION_SLOT_NBYTES


def activation_need_of_model(
    model_dir: str | Path,
    precision: Precision,
    choices: Sequence[BlockActivations],
    shapes: Sequence[tuple[int, int]],
    *,
    device: str = "cpu",
) -> ActivationNeed:
    """As `activation_need`, for the model of a folder and a plan's slots; needs no weights.

    `device`: where it will be computed, as operators choose their kernels by that.
    """
    runner = BlockRunner(partition_folder(model_dir, precision), torch.device(device), seed=0)
    return activation_need(runner, choices, shapes, ACTIVATION_SLOT_NBYTES)
