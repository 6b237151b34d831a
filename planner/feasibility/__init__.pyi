"""Says whether a job fits, the least memory that it needs, and what it lacks."""

from windlass.planner.feasibility.feasibility import fits as fits
from windlass.planner.feasibility.feasibility import largest_fitting as largest_fitting
from windlass.planner.feasibility.feasibility import least_memory_of as least_memory_of
from windlass.planner.feasibility.feasibility import numbers_of_microbatches as numbers_of_microbatches
from windlass.planner.feasibility.feasibility import with_part as with_part
from windlass.planner.feasibility.least_memory import LeastMemory as LeastMemory
from windlass.planner.feasibility.remedies import what_would_fit as what_would_fit
from windlass.planner.feasibility.shortfall import Shortfall as Shortfall
from windlass.planner.feasibility.shortfall import extremes as extremes
from windlass.planner.feasibility.shortfall import least_gpu as least_gpu
from windlass.planner.feasibility.shortfall import limits_for_plans as limits_for_plans
from windlass.planner.feasibility.shortfall import shortfall_of as shortfall_of
from windlass.planner.feasibility.shortfall import what_takes_memory as what_takes_memory
from windlass.planner.feasibility.shortfall import with_least_gpu as with_least_gpu
