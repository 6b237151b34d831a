"""Makes a plan of a job's memory: the arena that fits the budget, divided into slots."""

from windlass.engine.memory_plan.arena.choices import CACHED_BLOCKS as CACHED_BLOCKS
from windlass.engine.memory_plan.arena.choices import most_passing_blocks as most_passing_blocks
from windlass.engine.memory_plan.arena.layout import make_plan as make_plan
from windlass.engine.memory_plan.arena.layout import may_stream_tied as may_stream_tied
