"""A home that is a box of a head: commands for the head's users say so."""

import json
from pathlib import Path

import pytest

from windlass.service.installation.addresses import is_loopback
from windlass.service.installation.home import BOX_FILE, HomeError, box_of
from windlass.service.installation.local_key import open_client
from windlass.service.installation.settings import Settings


def test_commands_for_users_say_that_the_home_is_a_box(tmp_path: Path) -> None:
    fields = {"name": "attic", "head": "https://10.0.0.1:8643", "box_id": "box-1"}
    (tmp_path / BOX_FILE).write_text(json.dumps(fields))
    with pytest.raises(HomeError, match=r"box attic of the service at https://10.0.0.1:8643; type this command on the"):
        open_client(Settings(home=tmp_path))


def test_home_of_its_own_or_with_a_damaged_file_is_no_box(tmp_path: Path) -> None:
    assert box_of(tmp_path) is None
    (tmp_path / BOX_FILE).write_text("{")
    assert box_of(tmp_path) is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [("::ffff:127.0.0.1", True), ("::1", True), ("127.0.0.9", True), ("::ffff:10.0.0.1", False), ("::", False)],
)
def test_loopback_of_ipv4_is_loopback_in_ipv6_too(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
