"""The frame of a planner's process: it reads a question from a file, and writes the answer or a refusal to another."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.engine.model import UnsupportedArchitectureError
from windlass.planner.profiling import UnusableConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of a planner's process."""

    question: Path
    result: Path
    measuring: Path | None  # to be there while blocks of the model are measured


class AbandonedError(Exception):
    """The answer is not needed any more."""


class CannotBePlannedError(Exception):
    """No plan can be made, for a reason that lies in the request. The message says why."""


class RefusedError(Exception):
    """The job cannot be planned. `code` and `param` become those of the job's error."""

    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def arguments_of(arguments: Sequence[str], description: str) -> Files:
    """Reads the command line of a planner's process."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--question", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--measuring", type=Path, help="a file to be there while blocks of the model are measured")
    options = parser.parse_args(arguments)
    return Files(question=options.question, result=options.result, measuring=options.measuring)


def answer_question(files: Files, answer: Callable[[], dict[str, Any]]) -> None:
    """Writes {"ok": true, ...} with the answer, or {"ok": false, "error": {code, message, param}} if it refuses.

    Only errors that say that the request is wrong are refusals. All others are defects, and are raised.
    """
    try:
        result = {"ok": True, **answer()}
    except UnsupportedArchitectureError as error:
        result = _refusal(RefusedError("model_not_supported", str(error), "model"))
    except RefusedError as error:
        result = _refusal(error)
    except UnusableConfigError as error:
        result = _refusal(RefusedError("invalid_model", str(error), "model"))
    files.result.write_text(json.dumps(result))


def _refusal(error: RefusedError) -> dict[str, Any]:
    return {"ok": False, "error": {"code": error.code, "message": str(error), "param": error.param}}
