"""A folder that stands for `site-packages` on a machine with torch, transformers and little else.

A package that is not linked there cannot be imported. `find_spec` and package metadata do not find it either, because
`python -S` adds no other folder.
"""

import re
from importlib import metadata
from pathlib import Path

_ROOTS = ("torch", "transformers", "psutil", "highspy", "xxhash")
# Transformers requires these directly or indirectly, and works without them. A GPU machine may lack them.
_ABSENT = {"pydantic", "pydantic-core", "rich", "typer"}
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def link_torch_only(folder: Path) -> None:
    """Fills `folder` with links to the distributions that the GPU check may need, and to no others."""
    folder.mkdir()
    for name in _closure():
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(distribution.locate_file(top))))


def _closure() -> set[str]:
    """Names of the distributions that the roots require, without extras."""
    found: set[str] = set()
    names = list(_ROOTS)
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found or name in _ABSENT:
            continue
        try:
            required = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:  # needed on other platforms only
            continue
        found.add(name)
        names += [match[0] for each in required if "extra ==" not in each and (match := _NAME.match(each))]
    return found
