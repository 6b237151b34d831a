"""The messages between the actors of a job: ids and descriptors, never tensors.

Commands have imperative names, events past-tense names; failures are events too. Every message carries its job and
either a step and block or a correlation id. The scheduler's messages are about blocks. Workers send messages about
chunks directly to each other.
"""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
