"""A process ends together with the one that started it."""

import subprocess
import sys
import time
from pathlib import Path

from windlass.service.installation.process_ids import find_process, wait_until_gone

_SLEEP = "import time; time.sleep(60)"


def test_a_child_dies_with_its_parent_even_by_sigkill(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = "import os, sys; from windlass.actors.lifecycle import die_with_parent; "
    child += "die_with_parent(os.getppid()); "
    child += f"open({str(ready)!r}, 'w').write(str(os.getpid())); {_SLEEP}"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        while not (ready.exists() and ready.read_text()):
            time.sleep(0.01)
        orphan = find_process(int(ready.read_text()))
        assert orphan is not None
        process.kill()
        assert wait_until_gone([orphan], timeout_s=60.0)


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    code = "import os; from windlass.actors.lifecycle import die_with_parent; "
    code += "die_with_parent(os.getppid() + 1)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "ParentGoneError" in result.stderr
