"""Small jobs that use a device's streams in all ways. They need the fixture `small_activation_slots`."""

from typing import Any

from windlass.actors.worker_policy.block_queue import Ordering
from windlass.engine.memory_plan.activation_policy import ActivationChoice, BlockActivations
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import Precision

# The factors of a job that affect its streams.
JOBS: dict[str, dict[str, Any]] = {
    "active": {"precision": Precision.BF16},
    "kept": {"clip_norm": 0.5, "num_microbatches": 3, "tied": True},
    "spilled": {"clip_norm": 0.5, "placement": Placement(num_host_grad_blocks=1)},
    "mixed": {
        "precision": Precision.BF16,
        "tied": True,
        "placement": Placement(host_blocks=(1,), device_blocks=(0, 3), num_cached_params=2, commit_every=2),
    },
    "far ahead": {"num_microbatches": 2, "dropout": 0.1, "ordering": Ordering(max_prefetched=5)},
    "groups": {
        "precision": Precision.BF16,
        "tied": True,
        "num_microbatches": 3,
        "placement": Placement(group_size=2, num_cached_params=2, device_blocks=(3,)),
    },
    "streamed": {
        "num_microbatches": 2,
        "dropout": 0.1,
        "placement": Placement(
            streamed_blocks=(1, 2, 3),
            num_cached_params=2,
            activations=(
                *ActivationChoice.RECOMPUTE.of_layers(1),
                *ActivationChoice.KEEP.of_layers(1),
                *ActivationChoice.SWAP.of_layers(1),
            ),
            host_activation_nbytes=4 << 20,
        ),
    },
    "streamed gradients": {
        "precision": Precision.BF16,
        "num_microbatches": 3,
        "clip_norm": 0.5,
        "placement": Placement(streamed_blocks=(1, 2, 3), streams_grads=True, group_size=2, num_cached_params=2),
    },
    "all in pieces": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "lanes": 2,
        "clip_norm": 0.5,
        "cut_matrices": 1800,
        "placement": Placement(
            streamed_blocks=(1, 2, 3), streams_grads=True, streams_ends=True, group_size=2, num_cached_params=2
        ),
    },
    "cut matrices": {
        "precision": Precision.BF16,
        "num_microbatches": 2,
        "clip_norm": 0.5,
        "cut_matrices": 1800,
        "placement": Placement(streamed_blocks=(1, 2, 3), streams_grads=True, num_cached_params=2),
    },
    "gradients in one memory": {
        "precision": Precision.BF16,
        "num_microbatches": 2,
        "tied": True,
        "placement": Placement(streamed_blocks=(1, 2, 3), streams_grads=True, num_cached_params=2),
    },
    "swapped": {
        "num_microbatches": 2,
        "dropout": 0.1,
        "placement": Placement(
            activations=(
                BlockActivations(swap_input=True, swapped=frozenset({"aten.mm.default"})),
                *ActivationChoice.KEEP.of_layers(1),
                *ActivationChoice.SWAP.of_layers(1),
            ),
            host_activation_nbytes=4 << 20,
        ),
    },
    "lanes": {
        "precision": Precision.BF16,
        "tied": True,
        "num_microbatches": 4,
        "lanes": 2,
        "placement": Placement(group_size=3, num_cached_params=2, device_blocks=(3,)),
    },
    "lanes in one memory": {
        "precision": Precision.BF16,
        "num_microbatches": 4,
        "lanes": 3,
        "tied": True,
        "placement": Placement(streamed_blocks=(1, 2, 3), streams_grads=True, group_size=2, num_cached_params=2),
    },
}
