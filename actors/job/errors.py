"""The file of a job's errors with their details, for the user and for reports of bugs."""

import re
from contextlib import suppress
from pathlib import Path

from windlass.storage.ids import Attempt

_ERRORS_FILE = "error.txt"


def append_error(job_dir: Path, attempt: Attempt, text: str) -> None:
    """Appends an error of an attempt to the job's file of errors. Does nothing if the disk is full."""
    with suppress(OSError), (job_dir / _ERRORS_FILE).open("a") as file:  # the caller reports the error elsewhere too
        file.write(f"attempt {attempt}: {text.rstrip()}\n")


def last_error(job_dir: Path, attempt: Attempt) -> str | None:
    """Returns the last line of the last error of an attempt, without the module of its class. None if it has none."""
    try:
        text = (job_dir / _ERRORS_FILE).read_text(errors="replace")
    except OSError:
        return None
    entries = re.split(r"^attempt (\d+): ", text, flags=re.MULTILINE)[1:]  # number, error, number, error, ...
    errors = [
        error.strip() for number, error in zip(entries[::2], entries[1::2], strict=True) if int(number) == attempt
    ]
    if not errors or not errors[-1]:
        return None
    return re.sub(r"^(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_]\w*:)", "", errors[-1].splitlines()[-1])
