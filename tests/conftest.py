"""Set-up of pytest-xdist, with which `make test` runs the tests in several processes.

Also the fixtures that all tests of a run share: compiled kernels and a PostgreSQL server.
"""

import gc
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from tests.support.examples import LONG_VARIABLE
from tests.support.postgresql import PostgresServer, find_programs, postgres_server
from windlass.actors.lifecycle import lower_session
from windlass.actors.lifecycle.session_priority import COMPUTING_NICENESS
from windlass.engine.optimizer.adam_formulas import Format
from windlass.engine.optimizer.kernel_cache import load_kernel
from windlass.storage.ids import StatePrecision

# No limit, because an example's time depends more on the machine's other load than on the code. The short run tries the
# same examples each time, so that it fails only because of a change. The long run looks for new ones.
hypothesis.settings.register_profile("windlass", deadline=None, derandomize=os.environ.get(LONG_VARIABLE) != "1")
hypothesis.settings.load_profile("windlass")

_TESTS = Path(__file__).parent
# Tests in these folders start Ray, the service or a browser, which use more than one core. They also check processes,
# loop devices and mounts of the whole machine. One process runs them all in sequence.
_ONE_AFTER_THE_OTHER = ("e2e", "integration")
# Files of these folders that look at nothing outside their own service and browser. Any process may run them.
_BESIDE_OTHERS = (
    "test_access.py",
    "test_dashboard.py",
    "test_dashboard_boxes.py",
    "test_dashboard_plan.py",
    "test_dashboard_stages.py",
    "test_import_root.py",
    "test_light_commands.py",
)
# Each process holds torch and transformers. More processes would only wait for the tests of those folders.
_MOST_PROCESSES = 4


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def pytest_xdist_auto_num_workers() -> int:
    """The number for `-n auto`: two more than there are cores, as those tests mostly wait for other processes."""
    return min(_num_cores() + 2, _MOST_PROCESSES)


def pytest_configure() -> None:
    # As one of several processes: otherwise each would use all cores.
    if num_processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, _num_cores() // int(num_processes)))
    _set_niceness(COMPUTING_NICENESS)


def pytest_unconfigure() -> None:
    _set_niceness(0)


def _set_niceness(niceness: int) -> None:
    """Sets the niceness of the tests' session to that of their jobs, which would nearly stand still beside them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else the process that started this one does it
        lower_session(os.getpid(), niceness)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that `short` does not name as long."""
    unused: dict[str, set[str]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (marker := item.get_closest_marker("short")) is not None:
            names = {name for name in marker.args if fnmatchcase(item.callspec.id, name)}
            unused.setdefault(item.nodeid.partition("[")[0], set(marker.args)).difference_update(names)
            if not names:
                item.add_marker(pytest.mark.long)
    wrong = {test: names for test, names in unused.items() if names}
    if wrong and not any("::" in argument for argument in config.args):  # else not all cases were collected
        raise pytest.UsageError(f"`short` names cases that do not exist: {wrong}")


def pytest_collection_finish() -> None:
    # Freezes all tests and modules, so that tests that look for leftovers need not traverse them each time.
    gc.collect()
    gc.freeze()


class _FolderScheduling(LoadScopeScheduling):
    """Gives each file to any free process, except those that one process must run.

    The tests of a file share models and plans, which take longer to make than most tests do.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.split("::")[0])
        is_alone = path.parts[1] in _ONE_AFTER_THE_OTHER and path.name not in _BESIDE_OTHERS
        return "machine" if is_alone else str(path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """The scheduler of tests. Not `--dist=loadgroup`: pytest 9.2 ignores xdist 3.8's group names."""
    # In the order of the folders: the tests that are slow come first, and no process is idle at the end.
    config.option.loadscopereorder = False
    return _FolderScheduling(config, log)


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A cache that holds the AdamW kernels of bf16 models with bf16 gradients, for all three precisions of states.

    The processes of a run share it: `load_kernel` lets one compile while the others wait. None: there is no compiler.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return None
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory /= "kernels"
    formats = [
        Format(grad=torch.bfloat16, param=torch.bfloat16, states=states, decoupled=True) for states in StatePrecision
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda kernel: load_kernel(kernel, directory), formats))
    return directory


@pytest.fixture(scope="session")
def kernel_dir(compiled_kernels: Path | None) -> Path:
    """The same cache, for tests of the kernels themselves; skips them without a compiler."""
    if compiled_kernels is None:
        pytest.skip(f"there is no C++ compiler: {os.environ.get('CXX', 'g++')}")
    return compiled_kernels


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this process."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    with postgres_server(programs) as server:
        yield server


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Uses one thread, because several would wait for each other while other tests run."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
