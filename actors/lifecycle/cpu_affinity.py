"""Binds each optimizer of the pool to cores of one NUMA node, because that node's memory is the nearest to them."""

import os
from collections.abc import Sequence
from pathlib import Path

from windlass.storage.memory import parse_cpu_list

# Environment variables for OpenMP, which reads them when torch is imported. Waiting threads must not spin, because the
# optimizer, the copies, the I/O and other jobs run on the same cores. The processes that measure a model's blocks use
# the same setting as the workers: on busy cores, spinning threads take several times as long.
WAIT_POLICY = {"OMP_WAIT_POLICY": "PASSIVE"}
_NODES_DIR = Path("/sys/devices/system/node")


class TooFewCoresError(ValueError):
    """A process was given more threads than cores; the text gives both and says what to change."""


def numa_nodes(nodes_dir: Path = _NODES_DIR) -> list[frozenset[int]]:
    """Returns the cores of each NUMA node that this process may use; a single node if the system lists none."""
    allowed = frozenset(os.sched_getaffinity(0))
    lists = sorted(nodes_dir.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    nodes = [parse_cpu_list(path.read_text()) & allowed for path in lists]
    return [node for node in nodes if node] or [allowed]


def cores_of(index: int, num_optimizers: int, nodes: Sequence[frozenset[int]]) -> frozenset[int]:
    """Returns the cores of one optimizer.

    Optimizers are assigned to the nodes in turn. Those of one node share its cores.
    """
    node = sorted(nodes[index % len(nodes)])
    mates = range(index % len(nodes), num_optimizers, len(nodes))
    place, count = mates.index(index), len(mates)
    share = node[place * len(node) // count : (place + 1) * len(node) // count]
    return frozenset(share or node)


def bind_optimizer(index: int, num_optimizers: int, num_threads: int) -> None:
    """Binds the calling thread, and the threads that it starts from now on, to an optimizer's cores.

    Threads that the process has already started, such as those that move messages, may use any core.

    Raises:
        TooFewCoresError: the optimizer has more threads than cores.
    """
    cores = cores_of(index, num_optimizers, numa_nodes())
    if num_threads > len(cores):
        raise TooFewCoresError(
            f"optimizer {index} of {num_optimizers} has {len(cores)} cores on its NUMA node and is to run "
            f"{num_threads} threads; lower optimizer_threads or num_cpu_optimizers in the settings"
        )
    os.sched_setaffinity(0, cores)
