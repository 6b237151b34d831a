"""Checks whether a model can be trained: `python -m windlass.engine.checkpoint.check_model`.

The service runs it as a subprocess with limits. It builds the model without its weights, and checks its architecture
against plain autograd at a tiny size. It checks that no weights are missing. Then it writes the model's layout, so that
the other actors need not load torch to know it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from windlass.engine.checkpoint.reader import CheckpointError, CheckpointReader
from windlass.engine.model import (
    Partition,
    UnsupportedArchitectureError,
    build_meta_model,
    check_architecture,
    load_config,
)
from windlass.storage.ids import Precision


def check_model(model_dir: Path, precision: Precision, *, with_weights: bool, layout_file: Path) -> dict[str, Any]:
    """Checks a model, writes its layout, and returns {"num_params", "num_blocks", "architecture", "warnings"}.

    Raises:
        UnsupportedArchitectureError: windlass cannot train the architecture.
        CheckpointError: weights are missing, damaged, or not those of the architecture.
        OSError, ValueError: the folder cannot be read.
    """
    config = load_config(model_dir)
    check_architecture(config)
    model = build_meta_model(config, precision)
    partition = Partition(model)
    if with_weights:
        CheckpointReader(model_dir, partition.layout, build_meta_model(config, precision)).close()
    layout_file.write_text(partition.layout.to_json())
    return {
        "num_params": partition.layout.numel,
        "num_blocks": partition.num_blocks,
        "architecture": partition.name,
        "warnings": [],
    }


def main() -> None:
    """Writes {"ok": true, ...} or {"ok": false, "error": {code, message, param}} to the result file; exit code 0."""
    parser = argparse.ArgumentParser(description="Check that a model folder can be trained.")
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.BF16)
    parser.add_argument("--random-weights", action="store_true", help="the job initialises the weights itself")
    parser.add_argument("--layout-file", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = check_model(
            options.model_dir,
            options.precision,
            with_weights=not options.random_weights,
            layout_file=options.layout_file,
        )
        result = {"ok": True, **found}
    except (UnsupportedArchitectureError, CheckpointError) as error:
        code = "model_not_supported" if isinstance(error, UnsupportedArchitectureError) else "invalid_model"
        result = {"ok": False, "error": {"code": code, "message": str(error), "param": "model"}}
    except (OSError, ValueError) as error:
        message = f"the model folder cannot be read: {error}"
        result = {"ok": False, "error": {"code": "invalid_model", "message": message, "param": "model"}}
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
