"""The question to the planner, the facts and profiles that it is answered from, and the form of an answer."""

from windlass.planner.question.at_present import at_pace as at_pace
from windlass.planner.question.at_present import slowdown_of as slowdown_of
from windlass.planner.question.at_present import told_of_pace as told_of_pace
from windlass.planner.question.at_present import with_errors as with_errors
from windlass.planner.question.exact_search import counted as counted
from windlass.planner.question.exact_search import search_exactly as search_exactly
from windlass.planner.question.exact_search import solve_counted as solve_counted
from windlass.planner.question.exact_search import solve_exactly as solve_exactly
from windlass.planner.question.exact_search import solve_kind_exactly as solve_kind_exactly
from windlass.planner.question.job_plan import ChangedInputs as ChangedInputs
from windlass.planner.question.job_plan import JobPlan as JobPlan
from windlass.planner.question.job_plan import PlanBounds as PlanBounds
from windlass.planner.question.job_plan import SimulatedStep as SimulatedStep
from windlass.planner.question.job_plan import fewest_of_fastest as fewest_of_fastest
from windlass.planner.question.kept_shapes import KeptShapes as KeptShapes
from windlass.planner.question.plan_request import PlanRequest as PlanRequest
from windlass.planner.question.plan_request import ReplanRequest as ReplanRequest
from windlass.planner.question.profiles import Profiles as Profiles
from windlass.planner.question.question import PlanQuestion as PlanQuestion
from windlass.planner.question.report import ExampleTokens as ExampleTokens
from windlass.planner.question.report import PlanReport as PlanReport
from windlass.planner.question.report import WhatIf as WhatIf
from windlass.planner.question.report import choices_of as choices_of
from windlass.planner.question.report import report_of as report_of
from windlass.planner.question.report import with_limits as with_limits
