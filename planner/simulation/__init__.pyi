"""Simulates a plan with the scheduler's real policy, on resources with given rates."""

from windlass.planner.simulation.clock import Future as Future
from windlass.planner.simulation.clock import Process as Process
from windlass.planner.simulation.clock import ProcessReturning as ProcessReturning
from windlass.planner.simulation.compared import simulate_policy as simulate_policy
from windlass.planner.simulation.gpu import SimulatedGpu as SimulatedGpu
from windlass.planner.simulation.machine import ACTIVATIONS as ACTIVATIONS
from windlass.planner.simulation.machine import GRADIENTS as GRADIENTS
from windlass.planner.simulation.machine import LEAVING as LEAVING
from windlass.planner.simulation.machine import PARAMS as PARAMS
from windlass.planner.simulation.machine import SimulatedMachine as SimulatedMachine
from windlass.planner.simulation.planned_job import simulate_planned as simulate_planned
from windlass.planner.simulation.planned_job import simulated_step_s as simulated_step_s
from windlass.planner.simulation.resources import Resource as Resource
from windlass.planner.simulation.simulate import Stuck as Stuck
from windlass.planner.simulation.simulate import TooLong as TooLong
from windlass.planner.simulation.waiting import Queue as Queue
from windlass.planner.simulation.waiting import Signal as Signal
from windlass.planner.simulation.waiting import Slots as Slots
