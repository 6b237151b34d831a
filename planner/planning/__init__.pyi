"""Makes the plan of a job: searches a plan that fits, corrects it by measured steps, and reports it."""

from windlass.planner.planning.compare import Comparison as Comparison
from windlass.planner.planning.compare import comparison as comparison
from windlass.planner.planning.fewer_waits import BUSY_SHARES as BUSY_SHARES
from windlass.planner.planning.fewer_waits import waits as waits
from windlass.planner.planning.fewer_waits import with_idle_ssds as with_idle_ssds
from windlass.planner.planning.fewer_waits import with_more_passing as with_more_passing
from windlass.planner.planning.gpu_choice import choose_gpus as choose_gpus
from windlass.planner.planning.gpu_choice import numbers_of_gpus as numbers_of_gpus
from windlass.planner.planning.gpu_choice import plan_without_advice as plan_without_advice
from windlass.planner.planning.job_planning import plan_job as plan_job
from windlass.planner.planning.job_planning import question_of as question_of
from windlass.planner.planning.job_planning import watcher_of as watcher_of
from windlass.planner.planning.limits import find as find
from windlass.planner.planning.planner import Planned as Planned
from windlass.planner.planning.planner import answer as answer
from windlass.planner.planning.process import AbandonedError as AbandonedError
from windlass.planner.planning.process import RefusedError as RefusedError
from windlass.planner.planning.process import answer_question as answer_question
from windlass.planner.planning.process import arguments_of as arguments_of
from windlass.planner.planning.simulated_search import best_plan as best_plan
from windlass.planner.planning.simulated_search import fastest_plan as fastest_plan
