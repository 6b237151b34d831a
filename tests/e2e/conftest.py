"""What e2e tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.installation import Installation, free_port


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    """An installation of its own, of which nothing is left running."""
    installation = Installation(home=tmp_path / "home", port=free_port())
    yield installation
    installation.end()
