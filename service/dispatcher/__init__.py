"""The process that brings jobs from queued to done: queue, launch, outcomes, leases."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
