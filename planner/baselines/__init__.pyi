"""Step times and swap amounts of other systems, by their published policies."""

from windlass.planner.baselines.comparison import ComparedSystem as ComparedSystem
from windlass.planner.baselines.comparison import compare as compare
from windlass.planner.baselines.system_stages import POLICIES as POLICIES
from windlass.planner.baselines.system_stages import Policy as Policy
from windlass.planner.baselines.system_stages import Rest as Rest
from windlass.planner.baselines.system_stages import StageRates as StageRates
from windlass.planner.baselines.system_stages import StageTimes as StageTimes
from windlass.planner.baselines.system_stages import nbytes_on_ssd as nbytes_on_ssd
from windlass.planner.baselines.system_stages import stage_rates as stage_rates
from windlass.planner.baselines.system_stages import stage_times as stage_times
