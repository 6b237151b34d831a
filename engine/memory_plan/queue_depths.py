"""The depths of the queues that chunks and activations pass through. Deeper takes more memory."""

from dataclasses import dataclass

# Chunks of one block's params that may be on their way from the SSDs at once, beyond those being copied to the device.
FETCH_DEPTH = 4
# Chunks at one optimizer at once: one being read, one updated, one written back.
STATE_DEPTH = 3
MIN_STATE_DEPTH = 2
# Slots for activations on their way between the device and the SSDs: one is copied while others are read or written.
STAGED_ACTIVATIONS = 16
# Activations on their way out that may still lie on the device: what a link moves while a few layers are computed.
LEAVING_ACTIVATION_NBYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepths:
    """Of the buffers that things pass through."""

    params: int = FETCH_DEPTH  # chunks on their way from the SSDs
    states: int = STATE_DEPTH  # chunks at one optimizer; less where the budget is too small
    staged_activations: int = STAGED_ACTIVATIONS  # slots, of which there are no more than activations on the SSDs take
    leaving_nbytes: int = LEAVING_ACTIVATION_NBYTES  # activations on their way out that still lie on the device

    def __post_init__(self) -> None:
        for name, least in (("params", 1), ("states", 1), ("staged_activations", 1), ("leaving_nbytes", 0)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"depths: {name} is {number}; at least {least}, or nothing ever moves")
