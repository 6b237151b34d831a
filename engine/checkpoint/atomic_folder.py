"""Hidden folders in which models are written; a complete one is renamed to its final name. Imports no torch."""

import re
import shutil
import uuid
from pathlib import Path


def make_partial_folder(target: Path) -> Path:
    """Creates a hidden folder, with a unique name, for a model that will be renamed to `target`.

    The name is unique because a lost runner that wakes up must not write into its successor's folder.
    """
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    return partial


def remove_partial_folders(target: Path, *, and_checkpoints: bool = False) -> None:
    """Removes the partial folders that killed exports to `target` left, and none of longer names with that prefix.

    `and_checkpoints`: removes also those of exports to `{target}-step-{n}` with any number n.
    """
    step = r"(-step-\d+)?" if and_checkpoints else ""
    name = re.compile(rf"\.{re.escape(target.name)}{step}\.[0-9a-f]{{32}}\.partial")
    if target.parent.is_dir():
        for folder in target.parent.iterdir():
            if name.fullmatch(folder.name):
                shutil.rmtree(folder)
