"""The example in the documentation runs unchanged, and the page shows what it does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.training import has_direct_io, keep_calibration

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "docs/examples/offload_diffusion.py"


@pytest.mark.long
def test_the_example_runs(tmp_path: Path) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip(f"{tmp_path} lies on a file system without O_DIRECT")
    keep_calibration(tmp_path)
    settings = {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path), "CXX": "none", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **settings}
    command = [sys.executable, str(EXAMPLE), str(tmp_path), "16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]
    moved = re.search(r"from the SSD (\d+) MiB, to it (\d+) MiB", done.stdout)
    assert moved is not None
    assert min(map(int, moved.groups())) > 100
    weights = torch.load(tmp_path / "denoiser.pt")
    assert not any(tensor.is_meta for tensor in weights.values())


def test_the_page_is_about_the_same_lines() -> None:
    page = (ROOT / "docs/python-api.md").read_text()
    assert EXAMPLE.name in page
    for line in ("import windlass", "loss.backward()", "optimizer.step()"):
        assert line in page
        assert line in EXAMPLE.read_text()
