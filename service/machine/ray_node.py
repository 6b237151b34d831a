"""This machine's node of an external Ray cluster, for the setting `ray_address`.

A driver connects to a cluster through the node of its own machine, and all processes of a job are on one machine. So
jobs run on the dispatcher's node, whatever other nodes the cluster has.
"""

from dataclasses import dataclass
from typing import Any

import ray

from windlass.service.installation import find_gpus, models_of, num_cores
from windlass.service.jobs import MachineResources
from windlass.service.machine.ray_cluster import DEVICE_RESOURCE, NAMESPACE, RayStartError


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """The node that this process has joined, with its resources for jobs."""

    node_id: str
    resources: MachineResources

    @classmethod
    def join(cls, address: str, *, cpu_ranks: int = 1) -> "RayNode":
        """Makes this process a driver, in our namespace. Raises RayStartError.

        `cpu_ranks`: devices that the node must offer if it has no GPUs.
        """
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RayStartError(
                f"there is no node of the Ray cluster at {address} on this machine ({error.__cause__ or error})"
            ) from error
        return cls.of_this_process(cpu_ranks=cpu_ranks)

    @classmethod
    def of_this_process(cls, *, cpu_ranks: int | None = None) -> "RayNode":
        """Returns the node of a process that is already a driver. Raises RayStartError.

        `cpu_ranks`: see `join`; None: without GPUs, any number of devices is right.
        """
        node_id = ray.get_runtime_context().get_node_id()
        return cls(node_id=node_id, resources=_resources(_find(node_id), cpu_ranks))

    @property
    def is_running(self) -> bool:
        """Returns whether the cluster lists the node as alive. Ray does not notify a driver when its node ends."""
        return _find(self.node_id) is not None


def _find(node_id: str) -> dict[str, Any] | None:
    return next((node for node in ray.nodes() if node["NodeID"] == node_id and node["Alive"]), None)


def _resources(node: dict[str, Any] | None, cpu_ranks: int | None) -> MachineResources:
    if node is None:
        raise RayStartError("the Ray node of this machine has just ended")
    offered = node["Resources"]
    # `--num-cpus` may be less than the machine has, such as a container's share.
    cores = min(num_cores(), int(offered.get("CPU", 0)) or num_cores())
    num_devices = offered.get(DEVICE_RESOURCE, 0)
    cpu_ranks = cpu_ranks or max(1, int(num_devices))
    num_gpus = int(offered.get("GPU", 0))
    resources = MachineResources(
        num_cores=cores,
        num_gpus=num_gpus,
        cpu_ranks=cpu_ranks,
        gpu_models=models_of(find_gpus()) if num_gpus > 1 else (),
    )
    if num_devices != resources.num_devices:
        raise RayStartError(
            f"the Ray node of this machine offers {num_devices:g} of the resource {DEVICE_RESOURCE!r}, and has "
            f"{resources.num_gpus} GPUs: start it with --resources='{{\"{DEVICE_RESOURCE}\": {resources.num_devices}}}'"
        )
    return resources
