"""NUMA nodes: the one that a device is near to, and threads that run and allocate memory there."""

import ctypes
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")

_KIB = 1024
# The file cache of a node is freed for an arena only if this share of the node's memory stays free. If a strict policy
# ran out of memory, the kernel would end a process.
_SPARE_SHARE = 1 / 16
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237}  # numbers of the system call
_MPOL_PREFERRED, _MPOL_BIND = 1, 2  # from Linux's mempolicy.h


def node_near(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """Returns the NUMA node that a PCI device is near to.

    Returns None if the machine has one node, or if the kernel does not know the node.
    """
    if not has_several_nodes(sysfs):
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def has_several_nodes(sysfs: Path = SYSFS) -> bool:
    """Checks whether the machine has more than one NUMA node."""
    return len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) > 1


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parses core numbers in the kernel's notation, such as "0-3,8"."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node, and how threads are to allocate memory of it."""

    number: int
    cores: frozenset[int]  # that this process may use
    # Its file cache is freed rather than memory of another node used. It has room for all that will be allocated.
    is_strict: bool

    @classmethod
    def for_memory(cls, number: int, nbytes: int, sysfs: Path = SYSFS) -> "NumaNode":
        """Looks at a node on which `nbytes` will be allocated, by this process or at the same time by others."""
        folder = sysfs / f"devices/system/node/node{number}"
        cores, room = frozenset[int](), 0.0
        with suppress(OSError, ValueError, KeyError):
            cores = parse_cpu_list((folder / "cpulist").read_text()) & os.sched_getaffinity(0)
            room = _room_nbytes((folder / "meminfo").read_text())
        return cls(number, cores, is_strict=nbytes <= room)

    def enter(self) -> None:
        """Lets the calling thread run and allocate memory on the node from now on, as far as the kernel allows it.

        A container may refuse the policy. Then the cores decide, because a thread gets memory of the node that it runs
        on, while there is some.
        """
        if self.cores:
            with suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        if (number := _SET_MEMPOLICY.get(platform.machine())) is not None:
            mode = _MPOL_BIND if self.is_strict else _MPOL_PREFERRED
            words = (ctypes.c_ulong * (self.number // 64 + 1))()
            words[self.number // 64] = 1 << self.number % 64
            # The kernel takes one bit less than the number says.
            arguments = (ctypes.c_long(number), ctypes.c_long(mode), words, ctypes.c_ulong(64 * len(words) + 1))
            ctypes.CDLL(None).syscall(*arguments)


def _room_nbytes(meminfo: str) -> float:
    """Returns the bytes that can be allocated on a node, without those to spare, from its `meminfo`."""
    kib: dict[str, int] = {}
    for line in meminfo.splitlines():  # as in "Node 0 MemFree:  1024 kB"
        _, _, name, value, *_ = line.split()
        kib[name.removesuffix(":")] = int(value)
    available = kib["MemFree"] + kib["Active(file)"] + kib["Inactive(file)"]
    return _KIB * (available - _SPARE_SHARE * kib["MemTotal"])
