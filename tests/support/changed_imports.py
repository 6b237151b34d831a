"""Patches modules of the product when they are imported, in processes that a test starts.

A `sitecustomize.py` on a process's import path runs before any other module. The tests' own packages are not on that
path, so it loads this file with `runpy.run_path`.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and changes each one after it is loaded."""

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
    """Calls the function of each named module with that module, right after its first import."""
    sys.meta_path.insert(0, _Finder(changes))
