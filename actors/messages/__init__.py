"""What actors say to each other: ids and descriptors, never tensors.

Commands are imperative, events past tense, failures are events too. Every message carries its job and a correlation:
a step and block, or a correlation id. The scheduler speaks blocks; workers speak chunks, directly to each other.
"""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
