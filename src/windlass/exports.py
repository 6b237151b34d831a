"""Imports the public names of a package when they are first used.

Each room of windlass lists in its `__init__.pyi` the names that other rooms may import from it. Its `__init__.py` calls
`lazy_exports`. Type checkers then see plain imports, and a process loads no more of a room than it uses. This matters
because an actor that needs only a dataclass of a room must not load torch.

Source: Scientific Python's SPEC 1, "Lazy Loading of Submodules and Functions".
"""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_EXPORT = re.compile(r"^from (?P<module>[\w.]+) import (?P<name>\w+) as (?P=name)$", re.MULTILINE)


def exported_names(stub: Path) -> dict[str, str]:
    """Returns the names that a stub exports, and the module that defines each.

    A submodule is listed with its package.
    """
    return {match["name"]: match["module"] for match in _EXPORT.finditer(stub.read_text(encoding="utf-8"))}


def lazy_exports(package: str, init_file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's `__getattr__` and `__dir__`, from the `__init__.pyi` beside its `__init__.py`."""
    names = exported_names(Path(init_file).with_suffix(".pyi"))

    def get(name: str) -> Any:
        module = names.get(name)
        if module is None or module == package:  # a submodule: the import system finds it
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # The name is not kept in the package: a test that replaces it in its module would leave the replacement behind.
        return getattr(import_module(module), name)

    return get, lambda: sorted(names)
