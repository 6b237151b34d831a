"""Downloads a model from the hub.

`python -m windlass.service.preparation.hub_download --model M --model-dir D --result R`.

Safetensors, configuration and tokenizer only; the folder takes its name once it is complete. Nothing is downloaded if
the disk has no room for all of it.
"""

import argparse
import errno
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from windlass.amounts import bytes_text
from windlass.storage.files import sync_path, sync_tree
from windlass.storage.memory import directory_free_nbytes

# No pickled weights and no code; *.model are SentencePiece vocabularies.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


class NoRoomError(Exception):
    """The disk has no room for the model."""


def download(model: str, model_dir: Path) -> None:
    """Fetch a hub repository's files into `model_dir`.

    Raises:
        LookupError: The hub does not give them.
        NoRoomError: The disk has no room for them.
    """
    # Here and not above: it takes long to import, and reads its settings when it is.
    from huggingface_hub import snapshot_download

    # No model id begins with a dot: what is not complete is never listed or trained.
    partial = model_dir.with_name(f".{model_dir.name}.partial")
    partial.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _check_room(model, partial)
        # What an earlier try has brought stays and is not fetched again.
        snapshot_download(model, local_dir=partial, allow_patterns=list(_WANTED))
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        message = f"the model {model!r} could not be downloaded from the hub: {reason}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoomError(f"{message}. {_make_room(partial)}") from error
        raise LookupError(message) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    sync_tree(partial)
    partial.rename(model_dir)
    sync_path(model_dir.parent)


def _check_room(model: str, partial: Path) -> None:
    """Ask the hub for the sizes of what is still to come, and compare them with what is free."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        files = snapshot_download(model, local_dir=partial, allow_patterns=list(_WANTED), dry_run=True)
    except DryRunError:  # the hub is not reached: the download copies what its cache has, or says why
        return
    # One of the hub's cache is copied here.
    to_come = [each for each in files if each.will_download or not Path(each.local_path).is_file()]
    # A download that was cut off goes on where it ended.
    begun_nbytes = sum(path.stat().st_blocks * 512 for path in (partial / ".cache").rglob("*.incomplete"))
    nbytes = sum(each.file_size or 0 for each in to_come) - begun_nbytes
    free_nbytes = directory_free_nbytes(partial)
    if nbytes > free_nbytes:
        raise NoRoomError(
            f"the model {model!r} has {bytes_text(nbytes)} to download, but {bytes_text(free_nbytes)} are free in "
            f"{partial.parent}. {_make_room(partial)}"
        )


def _make_room(partial: Path) -> str:
    return (
        f"Make room on the disk of {partial.parent} (`windlass storage` lists what takes it), or set models_dir to a "
        "folder on a larger disk"
    )


def main(arguments: list[str]) -> int:
    """Download, and leave a result file in the form that preparation steps do."""
    parser = argparse.ArgumentParser(prog="hub_download")
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"ok": True}
    try:
        download(options.model, options.model_dir)
    except (LookupError, NoRoomError) as error:
        code = "does_not_fit" if isinstance(error, NoRoomError) else "model_not_found"
        result = {"ok": False, "error": {"code": code, "message": str(error), "param": "model"}}
    options.result.write_text(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
