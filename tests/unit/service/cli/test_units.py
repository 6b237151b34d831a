"""Units for systemd."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from windlass.service.cli.units import unit_of


def test_unit_passes_systemds_own_check(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    path = tmp_path / "windlass.service"
    path.write_text(unit_of(tmp_path / "a home", cluster_host="10.0.0.1", cluster_port=None, port=8642))
    command = ["systemd-analyze", "--user", "verify", "--man=no", path]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")
