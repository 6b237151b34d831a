"""Simulates planned jobs over several boxes, with and without faults."""

from windlass.planner.simulation.boxes.faults import BoxLost as BoxLost
from windlass.planner.simulation.boxes.faults import Fault as Fault
from windlass.planner.simulation.boxes.faults import FaultedRun as FaultedRun
from windlass.planner.simulation.boxes.faults import LinkCut as LinkCut
from windlass.planner.simulation.boxes.faults import run_with_faults as run_with_faults
from windlass.planner.simulation.boxes.faults import slowed as slowed
from windlass.planner.simulation.boxes.planned_stages import StagesToSimulate as StagesToSimulate
from windlass.planner.simulation.boxes.planned_stages import simulate_stages as simulate_stages
from windlass.planner.simulation.boxes.planned_stages import simulated_stages_step_s as simulated_stages_step_s
