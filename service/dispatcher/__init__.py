"""The dispatcher: the process that takes jobs from queued to done, with queue, launch, outcomes and leases."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
