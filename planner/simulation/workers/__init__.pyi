"""The simulated actors of a job. Each uses slots and resources as the real one does."""

from windlass.planner.simulation.workers.optimizer import Optimizer as Optimizer
from windlass.planner.simulation.workers.param_server import ParamServer as ParamServer
from windlass.planner.simulation.workers.worker import Worker as Worker
