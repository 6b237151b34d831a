"""Checks a training file within a time limit: `python -m windlass.engine.data.data_check`, a process of its own.

It needs no model: it checks that each line is JSON in one of the accepted formats. The preparation of a job's data
checks the rest of the file later, by the same rules.
"""

import argparse
import json
import time
from pathlib import Path

from windlass.engine.data.examples import DataError, DataFile

MAX_CHECK_S = 5.0  # seconds that the check of a file may take; the rest of a larger file is not checked


def check_data(file: DataFile, limit_s: float = MAX_CHECK_S) -> bool:
    """Reads a file's examples. Returns False if the limit ended the check. Raises `DataError` at a bad example."""
    until_s = time.monotonic() + limit_s
    return all(time.monotonic() < until_s for _ in file.examples())


def main() -> None:
    """Prints {"error": null} or {"error": {code, message, param}} as JSON."""
    parser = argparse.ArgumentParser(description="Check a training file.")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--name", required=True, help="what messages call it")
    parser.add_argument("--param", required=True, help="the request's field")
    options = parser.parse_args()
    fault = None
    try:
        check_data(DataFile(path=options.file, param=options.param, name=options.name))
    except DataError as error:
        fault = {"code": error.code, "message": error.message, "param": error.param}
    print(json.dumps({"error": fault}))


if __name__ == "__main__":
    main()
