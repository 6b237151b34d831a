"""Models whose facts are known without tracing them: formulas in their sizes, recorded from traces of small models."""

from windlass.planner.profiling.known.formulas import Formula as Formula
from windlass.planner.profiling.known.formulas import Sizes as Sizes
from windlass.planner.profiling.known.formulas import largest_value as largest_value
from windlass.planner.profiling.known.known_configs import shape_of_config as shape_of_config
from windlass.planner.profiling.known.known_model import KnownModel as KnownModel
from windlass.planner.profiling.known.known_model import NotKnownError as NotKnownError
from windlass.planner.profiling.known.known_model import known_facts as known_facts
from windlass.planner.profiling.known.known_model import variant_of as variant_of
from windlass.planner.profiling.known.recorded_sizes import RecordedSizes as RecordedSizes
from windlass.planner.profiling.known.recorded_sizes import operators_in as operators_in
from windlass.planner.profiling.known.recorded_sizes import unit_of as unit_of
