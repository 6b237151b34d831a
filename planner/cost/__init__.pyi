"""Costs that plans are made of: profiles of models, rates of machines, and the options for activations."""

from windlass.planner.cost.activation_options import ActivationOption as ActivationOption
from windlass.planner.cost.activation_options import Ways as Ways
from windlass.planner.cost.activation_options import by_benefit as by_benefit
from windlass.planner.cost.activation_options import holding_ways as holding_ways
from windlass.planner.cost.activation_options import ways_of_layer as ways_of_layer
from windlass.planner.cost.model_profile import AgainTimes as AgainTimes
from windlass.planner.cost.model_profile import BlockProfile as BlockProfile
from windlass.planner.cost.model_profile import LayerProfile as LayerProfile
from windlass.planner.cost.model_profile import ModelProfile as ModelProfile
from windlass.planner.cost.model_profile import OperatorProfile as OperatorProfile
from windlass.planner.cost.model_profile import TimesFacts as TimesFacts
from windlass.planner.cost.model_profile import Work as Work
from windlass.planner.cost.model_profile import for_lengths as for_lengths
from windlass.planner.cost.rates import Speeds as Speeds
from windlass.planner.cost.rates import speeds_of as speeds_of
