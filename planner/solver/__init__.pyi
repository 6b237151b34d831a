"""The integer programs that choose where states are resident and what is recomputed."""

from windlass.planner.solver.bisection import DEFAULT_SLACK as DEFAULT_SLACK
from windlass.planner.solver.bisection import Goal as Goal
from windlass.planner.solver.bisection import MarginSearch as MarginSearch
from windlass.planner.solver.bisection import largest as largest
from windlass.planner.solver.bisection import smallest as smallest
from windlass.planner.solver.memory_limits import DRIVER_NBYTES as DRIVER_NBYTES
from windlass.planner.solver.memory_limits import budgets_of as budgets_of
from windlass.planner.solver.memory_limits import limits_of as limits_of
from windlass.planner.solver.memory_limits import processes_nbytes as processes_nbytes
from windlass.planner.solver.placement_search import DoesNotFitError as DoesNotFitError
from windlass.planner.solver.placement_search import Solution as Solution
from windlass.planner.solver.placement_search import candidates as candidates
from windlass.planner.solver.placement_search import least_nbytes as least_nbytes
from windlass.planner.solver.placement_search import may_fit as may_fit
from windlass.planner.solver.placement_search import may_stream_grads as may_stream_grads
from windlass.planner.solver.placement_search import plan_of as plan_of
from windlass.planner.solver.placement_search import sizes_at_the_border as sizes_at_the_border
from windlass.planner.solver.placement_search import solution_of as solution_of
from windlass.planner.solver.placement_search import solve_job as solve_job
from windlass.planner.solver.step_cost import Limits as Limits
from windlass.planner.solver.step_cost import PlannedJob as PlannedJob
from windlass.planner.solver.step_cost import StepCosts as StepCosts
