"""Measures a machine and a model's blocks, and stores the times."""

from windlass.planner.profiling.combined_ssds import bytes_per_s_together as bytes_per_s_together
from windlass.planner.profiling.machine_pace import MachinePace as MachinePace
from windlass.planner.profiling.machine_pace import this_machine as this_machine
from windlass.planner.profiling.measure_model import BlockTimes as BlockTimes
from windlass.planner.profiling.measure_model import MeasuredBlocks as MeasuredBlocks
from windlass.planner.profiling.measure_model import measure_blocks as measure_blocks
from windlass.planner.profiling.measure_model import with_times as with_times
from windlass.planner.profiling.model_profiler import Profiler as Profiler
from windlass.planner.profiling.model_profiler import config_of_shape as config_of_shape
from windlass.planner.profiling.timing_cache import TimingCache as TimingCache
