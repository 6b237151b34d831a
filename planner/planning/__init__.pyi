"""Makes the plan of a job: searches a plan that fits, corrects it by measured steps, and reports it."""

from windlass.planner.planning.compare import Comparison as Comparison
from windlass.planner.planning.compare import comparison as comparison
from windlass.planner.planning.confidence import interval_in_words as interval_in_words
from windlass.planner.planning.gpu_choice import choose_gpus as choose_gpus
from windlass.planner.planning.job_plan import ChangedInputs as ChangedInputs
from windlass.planner.planning.job_plan import JobPlan as JobPlan
from windlass.planner.planning.job_plan import PlanBounds as PlanBounds
from windlass.planner.planning.job_plan import fewest_of_fastest as fewest_of_fastest
from windlass.planner.planning.limits import find as find
from windlass.planner.planning.measured_steps import MIN_STEPS as MIN_STEPS
from windlass.planner.planning.past_predictions import PastPrediction as PastPrediction
from windlass.planner.planning.past_predictions import PastPredictions as PastPredictions
from windlass.planner.planning.plan_request import PlanRequest as PlanRequest
from windlass.planner.planning.plan_request import ReplanRequest as ReplanRequest
from windlass.planner.planning.planner import Planned as Planned
from windlass.planner.planning.planner import answer as answer
from windlass.planner.planning.question import PlanQuestion as PlanQuestion
from windlass.planner.planning.report import PlanReport as PlanReport
from windlass.planner.planning.what_if import with_what_if as with_what_if
from windlass.planner.planning.worker import question_of as question_of
