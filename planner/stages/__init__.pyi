"""Plans of one job over several boxes in stages: each box computes a run of the model's blocks."""

from windlass.planner.stages.box_plans import BoxKind as BoxKind
from windlass.planner.stages.box_plans import BoxPlans as BoxPlans
from windlass.planner.stages.box_search import StagesError as StagesError
from windlass.planner.stages.box_search import best_plans as best_plans
from windlass.planner.stages.box_search import plans_over_boxes as plans_over_boxes
from windlass.planner.stages.box_search import what_boxes_lack as what_boxes_lack
from windlass.planner.stages.job_stages import ASSUMED_NETWORK_BYTES_PER_S as ASSUMED_NETWORK_BYTES_PER_S
from windlass.planner.stages.job_stages import StagesDoNotFitError as StagesDoNotFitError
from windlass.planner.stages.job_stages import plan_stages as plan_stages
from windlass.planner.stages.stages_plan import StagePlan as StagePlan
from windlass.planner.stages.stages_plan import StagesPlan as StagesPlan
from windlass.planner.stages.stages_report import StagesReport as StagesReport
from windlass.planner.stages.stages_request import PairRate as PairRate
from windlass.planner.stages.stages_request import RequestedBox as RequestedBox
from windlass.planner.stages.stages_request import StagesRequest as StagesRequest
