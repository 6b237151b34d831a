"""Checks a training file as far as seconds go: `python -m windlass.engine.data.data_check`, a process of its own.

It looks at what can be told without a model: that each line is JSON in one of the forms that are taken. Whatever it has
not come to is checked when a job's data is prepared, which reads the file by the same rules.
"""

import argparse
import json
import time
from pathlib import Path

from windlass.engine.data.examples import DataError, DataFile

# A file that is larger is still checked as far as this goes.
MAX_CHECK_S = 5.0


def check_data(file: DataFile, limit_s: float = MAX_CHECK_S) -> bool:
    """Read a file's examples, and tell whether that came to the file's end in time. Raises `DataError` at a bad one."""
    until_s = time.monotonic() + limit_s
    return all(time.monotonic() < until_s for _ in file.examples())


def main() -> None:
    """Print {"error": null}, or {"error": {code, message, param}}, as JSON."""
    parser = argparse.ArgumentParser(description="Check a training file.")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--name", required=True, help="what messages call it")
    parser.add_argument("--param", required=True, help="the request's field")
    options = parser.parse_args()
    told = None
    try:
        check_data(DataFile(path=options.file, param=options.param, name=options.name))
    except DataError as error:
        told = {"code": error.code, "message": error.message, "param": error.param}
    print(json.dumps({"error": told}))


if __name__ == "__main__":
    main()
