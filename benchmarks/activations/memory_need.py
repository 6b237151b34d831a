"""Computes the memory for swapped activations of a benchmark's job. Imports torch, but not Ray."""

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
    """Returns the bytes that a job's swapped activations take at once with a placement."""
    hyper = spec.training
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
    """Returns the result of `activation_need` for the model of a folder. Needs no weights.

    `device`: device of the job, because operators choose their kernels by device.
    """
    runner = BlockRunner(partition_folder(model_dir, precision), torch.device(device), seed=0)
    return activation_need(runner, choices, shapes, ACTIVATION_SLOT_NBYTES)
