"""The quick form of `benchmarks.dispatch`, with jobs on a Ray of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KEYS = {"host_ms_per_layer_step", "control_cpu_ms_per_block_step", "messages_per_block_step", "commit_ms"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_dispatch_quick_form_reports_all_figures_of_each_mode(direct_home: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.dispatch", "--quick", "--directory", str(direct_home)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert set(figures) == {"device", "host", "ssd"}
    for of_mode in figures.values():
        assert set(of_mode) == KEYS
        assert all(value > 0 for value in of_mode.values())
    # States on the device need the fewest messages, those on the SSDs the most.
    num_messages = [figures[mode]["messages_per_block_step"] for mode in ("device", "host", "ssd")]
    assert num_messages == sorted(num_messages)
    assert list(direct_home.iterdir()) == []
