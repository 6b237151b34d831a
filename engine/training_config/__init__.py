"""The settings of a job's training, which the service, the planner, the simulator and the workers share."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
