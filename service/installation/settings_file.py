"""Settings that commands write into the file of a home, because they are to last beyond the command."""

import re
import tomllib
from pathlib import Path
from typing import Any

from windlass.service.installation.settings import SETTINGS_FILE
from windlass.storage.files import write_durably


def write_setting(home: Path, name: str, value: str, *, command: str) -> Any:
    """Puts a setting into the home's file, in place of the value that the same command wrote there before.

    Returns None or, if the user has written the setting there, that value, which stays.
    `value`: as TOML. `command`: is named in the file. Raises OSError.
    """
    file = home / SETTINGS_FILE
    before = file.read_text() if file.exists() else ""
    mark = f"# Written by `{command}`.\n"
    kept = re.sub(rf"{re.escape(mark)}{re.escape(name)} = .*\n", "", before)
    if (own := tomllib.loads(kept).get(name)) is not None:
        return own
    # First, because what follows a table's heading would belong to the table.
    write_durably(file, f"{mark}{name} = {value}\n{kept}")
    return None
