"""The simulated parts of a GPU worker and of an optimizer. Each uses slots and resources as the real one does."""

from windlass.planner.simulation.workers.optimizer import Optimizer as Optimizer
from windlass.planner.simulation.workers.worker import Worker as Worker
