"""Records, summarizes and exports the time spans and the memory of each resource in a step."""

from windlass.actors.timeline.intervals import Interval as Interval
from windlass.actors.timeline.intervals import clip as clip
from windlass.actors.timeline.intervals import length as length
from windlass.actors.timeline.intervals import shared_out as shared_out
from windlass.actors.timeline.intervals import subtract as subtract
from windlass.actors.timeline.intervals import union as union
from windlass.actors.timeline.memory_levels import Level as Level
from windlass.actors.timeline.memory_levels import TierMemory as TierMemory
from windlass.actors.timeline.memory_levels import memory_of as memory_of
from windlass.actors.timeline.recorder import COMPUTE as COMPUTE
from windlass.actors.timeline.recorder import FROM_DEVICE as FROM_DEVICE
from windlass.actors.timeline.recorder import NO_BLOCK as NO_BLOCK
from windlass.actors.timeline.recorder import TO_DEVICE as TO_DEVICE
from windlass.actors.timeline.recorder import WHOLE_BLOCK as WHOLE_BLOCK
from windlass.actors.timeline.recorder import SpanRecorder as SpanRecorder
from windlass.actors.timeline.recorder import transfer_kind as transfer_kind
from windlass.actors.timeline.resource_usage import Measured as Measured
from windlass.actors.timeline.span_files import FOLDER as FOLDER
from windlass.actors.timeline.span_files import KEPT_STEPS as KEPT_STEPS
from windlass.actors.timeline.span_files import SIMULATED_FOLDER as SIMULATED_FOLDER
from windlass.actors.timeline.span_files import StepSpans as StepSpans
from windlass.actors.timeline.span_files import held_steps as held_steps
from windlass.actors.timeline.span_files import keep_step as keep_step
from windlass.actors.timeline.span_files import load_step as load_step
from windlass.actors.timeline.summary import Timeline as Timeline
from windlass.actors.timeline.trace_export import trace_of as trace_of
