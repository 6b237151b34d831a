"""The machine and its Ray: `windlass doctor`, the cluster, the node."""

from windlass.service.machine.devices import check_gpus as check_gpus
from windlass.service.machine.doctor import DoctorError as DoctorError
from windlass.service.machine.doctor import check_limits as check_limits
from windlass.service.machine.doctor import measure_hardware as measure_hardware
from windlass.service.machine.doctor import measured_hardware as measured_hardware
from windlass.service.machine.ports import check_ports as check_ports
from windlass.service.machine.ray_cluster import TOKEN_FILE as TOKEN_FILE
from windlass.service.machine.ray_cluster import RayCluster as RayCluster
from windlass.service.machine.ray_node import RayNode as RayNode
