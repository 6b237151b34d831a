"""Settings of links, and names in their certificates."""

import re

import pytest

from tests.support.storage.links import identity
from windlass.storage.ids import BoxName
from windlass.storage.link import Codec, LinkSettings, server_name


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_streams": 0},
        {"num_streams": 17},
        {"piece_nbytes": 0},
        {"piece_nbytes": 5 << 20},
        {"piece_nbytes": 4096, "window_nbytes": 4095},
        {"heartbeat_s": 0.0},
        {"heartbeat_s": 6.0},
        {"silence_s": 4.0},
        {"connect_s": 20.0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if len(wrong) == 1 else "window_nbytes"):
        LinkSettings(**wrong)  # type: ignore[arg-type]


def test_secret_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        identity("left", secret=bytes(31))


def test_secret_is_not_shown() -> None:
    assert "secret" not in repr(identity("left"))


def test_server_names_are_dns_names_whatever_the_box_is_called() -> None:
    names = {server_name(BoxName(box)) for box in ("a", "A", "a_b.c", "x" * 63)}
    assert len(names) == 4
    assert all(re.fullmatch(r"[0-9a-f]{32}\.link\.windlass\.internal", name) for name in names)


def test_two_message_types_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        Codec([type("Heartbeat", (), {})])
