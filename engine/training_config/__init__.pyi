"""The settings of a job's training, which the service, the planner, the simulator and the workers share."""

from windlass.engine.training_config import config_json as config_json
from windlass.engine.training_config.training_config import EarlyStopping as EarlyStopping
from windlass.engine.training_config.training_config import FinalModel as FinalModel
from windlass.engine.training_config.training_config import Initialization as Initialization
from windlass.engine.training_config.training_config import Optimizer as Optimizer
from windlass.engine.training_config.training_config import Schedule as Schedule
from windlass.engine.training_config.training_config import TrainingConfig as TrainingConfig
from windlass.engine.training_config.training_config import check_accumulation_precision as check_accumulation_precision
from windlass.engine.training_config.training_config import check_lanes as check_lanes
from windlass.engine.training_config.training_config import check_update_order as check_update_order
