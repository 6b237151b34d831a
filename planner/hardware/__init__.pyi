"""Profiles of machines and shapes of models, from YAML files."""

from windlass.planner.hardware.hardware import Gpus as Gpus
from windlass.planner.hardware.hardware import Hardware as Hardware
from windlass.planner.hardware.hardware import Host as Host
from windlass.planner.hardware.hardware import Pcie as Pcie
from windlass.planner.hardware.hardware import Ssds as Ssds
from windlass.planner.hardware.hardware import example_machines as example_machines
from windlass.planner.hardware.hardware import save_hardware as save_hardware
from windlass.planner.hardware.hardware import unusual as unusual
from windlass.planner.hardware.model_shape import ModelShape as ModelShape
from windlass.planner.hardware.model_shape import published_model as published_model
from windlass.planner.hardware.model_shape import published_models as published_models
from windlass.planner.hardware.model_shape import similar_models as similar_models
from windlass.planner.hardware.named_machines import UnknownMachineError as UnknownMachineError
from windlass.planner.hardware.named_machines import desktop_sizes as desktop_sizes
from windlass.planner.hardware.named_machines import endurance_tbw_of as endurance_tbw_of
from windlass.planner.hardware.named_machines import limit_in_words as limit_in_words
from windlass.planner.hardware.named_machines import machine_name as machine_name
from windlass.planner.hardware.named_machines import machine_names as machine_names
from windlass.planner.hardware.named_machines import machine_of as machine_of
from windlass.planner.hardware.named_machines import with_faster_card as with_faster_card
from windlass.planner.hardware.named_machines import with_more_ram as with_more_ram
from windlass.planner.hardware.named_machines import with_more_ssds as with_more_ssds
from windlass.planner.hardware.named_machines import with_one_more_gpu as with_one_more_gpu
from windlass.planner.hardware.yaml_files import YamlFileError as YamlFileError
from windlass.planner.hardware.yaml_files import load as load
