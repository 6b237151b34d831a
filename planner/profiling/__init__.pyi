"""Measures a machine and a model's blocks, and stores the times."""

from windlass.planner.profiling.block_times import BlockTimes as BlockTimes
from windlass.planner.profiling.block_times import MeasuredBlocks as MeasuredBlocks
from windlass.planner.profiling.block_times import with_times as with_times
from windlass.planner.profiling.combined_ssds import bytes_per_s_together as bytes_per_s_together
from windlass.planner.profiling.facts_choice import facts_of as facts_of
from windlass.planner.profiling.facts_choice import num_params_of as num_params_of
from windlass.planner.profiling.machine_pace import MachinePace as MachinePace
from windlass.planner.profiling.machine_pace import pace_of_an_answer as pace_of_an_answer
from windlass.planner.profiling.machine_pace import this_machine as this_machine
from windlass.planner.profiling.measure_model import BlockBench as BlockBench
from windlass.planner.profiling.measure_model import Round as Round
from windlass.planner.profiling.measure_model import measure_blocks as measure_blocks
from windlass.planner.profiling.model_config import FolderConfig as FolderConfig
from windlass.planner.profiling.model_config import ShapeConfig as ShapeConfig
from windlass.planner.profiling.model_config import UnusableConfigError as UnusableConfigError
from windlass.planner.profiling.model_config import content_of as content_of
from windlass.planner.profiling.model_config import loaded as loaded
from windlass.planner.profiling.model_config import read_config as read_config
from windlass.planner.profiling.model_profiler import Profiler as Profiler
from windlass.planner.profiling.model_profiler import TracedModel as TracedModel
from windlass.planner.profiling.model_profiler import config_of_shape as config_of_shape
from windlass.planner.profiling.profiled_facts import LayerOperators as LayerOperators
from windlass.planner.profiling.profiled_facts import ProfiledFacts as ProfiledFacts
from windlass.planner.profiling.profiled_facts import on_gpu as on_gpu
from windlass.planner.profiling.profiled_facts import profile_of as profile_of
from windlass.planner.profiling.timing_cache import TimingCache as TimingCache
