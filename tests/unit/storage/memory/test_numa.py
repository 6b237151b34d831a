import ctypes
import os
import threading
from pathlib import Path

import pytest

from windlass.storage.memory import numa
from windlass.storage.memory.numa import NumaNode, has_several_nodes, node_near, parse_cpu_list

GPU = "0000:c1:00.0"
MEMINFO = """Node 1 MemTotal:       16000 kB
Node 1 MemFree:         3000 kB
Node 1 Active(anon):    9999 kB
Node 1 Active(file):    2000 kB
Node 1 Inactive(file):  1000 kB
Node 1 Shmem:           9999 kB
"""
ROOM_NBYTES = 1024 * (3000 + 2000 + 1000 - 1000)


def make_sysfs(root: Path, num_nodes: int, gpu_node: str | None) -> Path:
    (root / "devices/system/node").mkdir(parents=True)
    for number in range(num_nodes):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{4 * number}-{4 * number + 3}\n")
        (folder / "meminfo").write_text(MEMINFO)
    (root / "devices/system/node/online").write_text("0\n")
    if gpu_node is not None:
        (root / "bus/pci/devices" / GPU).mkdir(parents=True)
        (root / "bus/pci/devices" / GPU / "numa_node").write_text(gpu_node)
    return root


@pytest.mark.parametrize(
    ("text", "expected"), [("0-3\n", {0, 1, 2, 3}), ("0,2-3,8", {0, 2, 3, 8}), ("5", {5}), ("\n", set())]
)
def test_the_kernels_lists(text: str, expected: set[int]) -> None:
    assert parse_cpu_list(text) == expected


@pytest.mark.parametrize(
    ("num_nodes", "gpu_node", "expected"),
    [
        (2, "1\n", 1),
        (2, "0\n", 0),
        (2, "-1\n", None),
        (2, None, None),
        (2, "", None),
        (1, "0\n", None),
        (0, "0\n", None),
    ],
)
def test_device_has_a_node_if_there_are_several(
    tmp_path: Path, num_nodes: int, gpu_node: str | None, expected: int | None
) -> None:
    sysfs = make_sysfs(tmp_path, num_nodes, gpu_node)
    assert node_near(GPU, sysfs) == expected
    assert has_several_nodes(sysfs) is (num_nodes > 1)


@pytest.mark.parametrize(("nbytes", "is_strict"), [(ROOM_NBYTES, True), (ROOM_NBYTES + 1, False)])
def test_policy_is_strict_if_memory_and_file_cache_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, is_strict: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 6})
    sysfs = make_sysfs(tmp_path, 2, "1")
    assert NumaNode.for_memory(1, nbytes, sysfs) == NumaNode(1, frozenset({5, 6}), is_strict=is_strict)


def test_node_that_the_kernel_does_not_describe_is_preferred_only(tmp_path: Path) -> None:
    assert NumaNode.for_memory(7, 1, tmp_path) == NumaNode(7, frozenset(), is_strict=False)


def policy_after_entering(node: NumaNode) -> tuple[int, int]:
    """Returns the memory policy of a thread that has entered a node, and its nodes as bits."""
    get_mempolicy = {"x86_64": 239, "aarch64": 236, "riscv64": 236}.get(os.uname().machine)
    if get_mempolicy is None:
        pytest.skip("the number of the system call is not known here")
    mode, nodes, results = ctypes.c_int(-1), (ctypes.c_ulong * 16)(), list[int]()

    def enter() -> None:
        node.enter()
        words = (ctypes.c_long(get_mempolicy), ctypes.byref(mode), nodes, ctypes.c_ulong(64 * 16), None, 0)
        results.append(ctypes.CDLL(None).syscall(*words))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if results != [0]:
        pytest.skip("this system does not say what a thread's memory policy is")
    return mode.value, nodes[0]


@pytest.mark.parametrize(("is_strict", "mode"), [(True, numa._MPOL_BIND), (False, numa._MPOL_PREFERRED)])
def test_thread_that_enters_has_the_nodes_policy(is_strict: bool, mode: int) -> None:
    found = policy_after_entering(NumaNode(0, frozenset(), is_strict=is_strict))
    if found == (0, 0):
        pytest.skip("this system does not let threads set a memory policy")
    assert found == (mode, 1)


def test_thread_that_enters_a_node_which_does_not_exist_goes_on() -> None:
    assert policy_after_entering(NumaNode(511, frozenset({100_000}), is_strict=True)) == (0, 0)
