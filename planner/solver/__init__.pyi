"""The integer programs that choose where states are resident and what is recomputed."""

from windlass.planner.solver.bisection import DEFAULT_SLACK as DEFAULT_SLACK
from windlass.planner.solver.bisection import Goal as Goal
from windlass.planner.solver.bisection import largest as largest
from windlass.planner.solver.bisection import smallest as smallest
from windlass.planner.solver.family import sizes_at_the_border as sizes_at_the_border
from windlass.planner.solver.integer_program import Assignment as Assignment
from windlass.planner.solver.memory_frontier import Bytes as Bytes
from windlass.planner.solver.memory_frontier import MemoryFrontier as MemoryFrontier
from windlass.planner.solver.memory_frontier import frontiers_of as frontiers_of
from windlass.planner.solver.memory_limits import DRIVER_NBYTES as DRIVER_NBYTES
from windlass.planner.solver.memory_limits import budgets_of as budgets_of
from windlass.planner.solver.memory_limits import limits_of as limits_of
from windlass.planner.solver.memory_limits import processes_nbytes as processes_nbytes
from windlass.planner.solver.placement_search import Found as Found
from windlass.planner.solver.placement_search import search as search
from windlass.planner.solver.placement_search import solve_job as solve_job
from windlass.planner.solver.solution import DoesNotFitError as DoesNotFitError
from windlass.planner.solver.solution import Solution as Solution
from windlass.planner.solver.solution import placement_of as placement_of
from windlass.planner.solver.solution import plan_of as plan_of
from windlass.planner.solver.solution import solution_of as solution_of
from windlass.planner.solver.solution import solved as solved
from windlass.planner.solver.step_cost import Limits as Limits
from windlass.planner.solver.step_cost import PlannedJob as PlannedJob
from windlass.planner.solver.step_cost import StepCosts as StepCosts
