"""The hidden folder beside its place in which a model is written, until it is whole. Imports no torch."""

import re
import shutil
import uuid
from pathlib import Path


def make_partial_folder(target: Path) -> Path:
    """A new one for a model that is to be `target`, under a name of its own.

    A lost runner that wakes up must not write into its successor's folder.
    """
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    return partial


def remove_partial_folders(target: Path, *, and_checkpoints: bool = False) -> None:
    """Remove what killed processes left of exports to `target`, and to no other name that begins like it.

    `and_checkpoints`: and to `{target}-step-{n}` with any number.
    """
    step = r"(-step-\d+)?" if and_checkpoints else ""
    name = re.compile(rf"\.{re.escape(target.name)}{step}\.[0-9a-f]{{32}}\.partial")
    if target.parent.is_dir():
        for folder in target.parent.iterdir():
            if name.fullmatch(folder.name):
                shutil.rmtree(folder)
