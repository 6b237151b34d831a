"""Checks of uploaded training data, made before the file is stored.

Errors name the file, the line and the expected form.
"""

import contextlib
import json
import logging
import sys
import tempfile
from pathlib import Path

from windlass.engine.data import MAX_CHECK_S, DataError, DataFile, check_data, foreign_file, format_hint, is_accepted
from windlass.service.api.middleware import BusyError, Turnstile
from windlass.service.preparation.sandbox import LimitedCommand, start_limited
from windlass.service.validation import ApiError, describe_value

_LOG = logging.getLogger(__name__)

_PARAM = "file"
# A smaller file is checked in this process. A larger one gets a process of its own with limited memory, so that no
# other request waits for it.
_MOST_HERE_NBYTES = 256 * 1024
_MEMORY_NBYTES = 2 * 1024**3


def check_name(filename: str, head: bytes) -> None:
    """Raises ApiError if the file's name does not end in .jsonl.

    `head`: the file's first bytes, to recognize its format.
    """
    if filename.lower().endswith(".jsonl"):
        return
    hint = foreign_file(head)
    if hint is not None:
        advice = format_hint(hint, filename, is_accepted)
    else:
        advice = f"if it has one JSON object a line, name it {Path(filename).stem or 'train'}.jsonl"
    raise ApiError(
        f"file: the name must end in .jsonl, got {describe_value(filename)}; {advice}",
        param=_PARAM,
        code="invalid_file",
    )


def check_content(path: Path, filename: str, *, checks: Turnstile, user: str | None) -> None:
    """Raises ApiError if a line of the file is no training example, as far as a check of a few seconds shows.

    A large file is not checked while another large file of the same user is, or while `checks` is full. Its job's
    preparation checks it later.
    """
    if path.stat().st_size <= _MOST_HERE_NBYTES:
        try:
            check_data(DataFile(path=path, param=_PARAM, name=filename))
        except DataError as error:
            raise ApiError(f"file: {error.message}", param=_PARAM, code=error.code) from None
        return
    with contextlib.suppress(BusyError), checks.entered(user):
        if (found := _checked_by_process(path, filename)) is not None:
            raise ApiError(f"file: {found['message']}", param=_PARAM, code=found["code"])


def _checked_by_process(path: Path, filename: str) -> dict[str, str] | None:
    """Returns the error that a child process finds in the file, or None.

    None also means that the process failed. The job's preparation then checks the file.
    """
    command = ("-m", "windlass.engine.data.data_check", "--file", str(path), f"--name={filename}", "--param", _PARAM)
    with tempfile.TemporaryFile() as output:
        process = start_limited(
            LimitedCommand(
                command=(sys.executable, *command),
                home=path.parent,
                cpu_s=int(2 * MAX_CHECK_S),
                address_space_nbytes=_MEMORY_NBYTES,
            ),
            output,
        )
        try:
            code = process.wait()
        finally:
            process.kill()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    try:
        found: dict[str, str] | None = json.loads(lines[-1])["error"]
    except (ValueError, LookupError, TypeError):
        _LOG.warning("%s was not checked: its process ended with code %d: %s", path.name, code, lines[-3:])
        return None
    return found
