"""Downloads a model from the hub.

`python -m windlass.service.preparation.hub_download --model M --model-dir D --result R`.

Safetensors, configuration and tokenizer only; the folder takes its name once it is complete.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from windlass.storage.files import sync_path, sync_tree

# No pickled weights and no code; *.model are SentencePiece vocabularies.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def download(model: str, model_dir: Path) -> None:
    """Fetch a hub repository's files into `model_dir`; LookupError where that can't be done."""
    # Here and not above: it takes long to import, and reads its settings when it is.
    from huggingface_hub import snapshot_download

    # No model id begins with a dot: what is not complete is never listed or trained.
    partial = model_dir.with_name(f".{model_dir.name}.partial")
    partial.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # What an earlier try has brought stays and is not fetched again.
        snapshot_download(model, local_dir=partial, allow_patterns=list(_WANTED))
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise LookupError(f"the model {model!r} could not be downloaded from the hub: {reason}") from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    sync_tree(partial)
    partial.rename(model_dir)
    sync_path(model_dir.parent)


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
    except LookupError as error:
        result = {"ok": False, "error": {"code": "model_not_found", "message": str(error), "param": "model"}}
    options.result.write_text(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
