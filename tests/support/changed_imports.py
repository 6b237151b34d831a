"""Changes modules of the product as they are imported, in processes that a test starts.

A folder with a `sitecustomize.py` on a process's import path runs before anything else in it. There, the tests' own
packages are not on the path: `runpy.run_path` loads this file.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and changes it once it is loaded."""

    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._changes = dict(changes)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def change_when_imported(changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Calls the function of each named module with the module, right after it was first imported."""
    sys.meta_path.insert(0, _Finder(changes))
