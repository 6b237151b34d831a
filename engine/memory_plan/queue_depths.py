"""The depths of the queues for chunks and activations. Deeper queues use more memory."""

from dataclasses import dataclass

# Chunks of one block's params that may be in flight from the SSDs, beyond those being copied to the device.
FETCH_DEPTH = 4
# Chunks at one optimizer: one is read, one is updated, one is written back.
STATE_DEPTH = 3
MIN_STATE_DEPTH = 2
# Slots for activations in flight between the device and the SSDs: one is copied while others are read or written.
STAGED_ACTIVATIONS = 16
# Bytes of activations in flight to the host that are still on the device: about what a link moves during a few layers.
LEAVING_ACTIVATION_NBYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepths:
    """The sizes of the buffers for data in flight."""

    params: int = FETCH_DEPTH  # chunks in flight from the SSDs
    states: int = STATE_DEPTH  # chunks at one optimizer; fewer if the budget is too small
    staged_activations: int = STAGED_ACTIVATIONS  # slots; limited by the number of slots on the SSDs
    leaving_nbytes: int = LEAVING_ACTIVATION_NBYTES  # activations in flight to the host that are still on the device

    def __post_init__(self) -> None:
        for name, least in (("params", 1), ("states", 1), ("staged_activations", 1), ("leaving_nbytes", 0)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"depths: {name} is {number}; at least {least}, or nothing ever moves")
