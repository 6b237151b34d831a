"""The device that computes: its choice, its streams, its buffers, and the processors' thread settings."""

from windlass.engine.device.buffer_pool import BufferClass as BufferClass
from windlass.engine.device.buffer_pool import DeviceBuffers as DeviceBuffers
from windlass.engine.device.buffer_pool import round_in_place as round_in_place
from windlass.engine.device.device import Device as Device
from windlass.engine.device.device import copy as copy
from windlass.engine.device.device import copy_all as copy_all
from windlass.engine.device.device_choice import GpuUnusableError as GpuUnusableError
from windlass.engine.device.device_choice import compute_device as compute_device
from windlass.engine.device.device_choice import memory_node as memory_node
from windlass.engine.device.device_choice import with_index as with_index
from windlass.engine.device.dtypes import TORCH_DTYPE as TORCH_DTYPE
from windlass.engine.device.dtypes import state_dtype as state_dtype
from windlass.engine.device.malloc import retain_freed_memory as retain_freed_memory
from windlass.engine.device.openmp import compute_on_cpu as compute_on_cpu
from windlass.engine.device.openmp import release_team as release_team
from windlass.engine.device.openmp import release_team_beside_compute as release_team_beside_compute
from windlass.engine.device.overlaid_buffers import OverlaidBuffers as OverlaidBuffers
from windlass.engine.device.param_loader import BlockLoad as BlockLoad
from windlass.engine.device.param_loader import OnArrival as OnArrival
from windlass.engine.device.param_loader import ParamLoader as ParamLoader
from windlass.engine.device.registered_memory import registration_cuts as registration_cuts
from windlass.engine.device.streams import Event as Event
from windlass.engine.device.streams import Stream as Stream
from windlass.engine.device.tensor_arena import TensorArena as TensorArena
