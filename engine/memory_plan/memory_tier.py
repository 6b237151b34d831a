"""The tiers of memory."""

from enum import StrEnum


class MemoryTier(StrEnum):
    """A tier of memory, the fastest first, with the name that plans and the API use."""

    DEVICE = "gpu"  # the device's memory, also where the device is the CPU
    HOST = "host"
    SSD = "ssd"
