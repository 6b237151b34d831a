"""The demo says where the plan of its job keeps the model's states."""

from windlass.service.demo.__main__ import states_in_words


def test_states_on_ssds_are_said_to_move() -> None:
    said = states_in_words({"states_on_ssd": 12, "states_on_host": 0, "states_on_gpu": 0})
    assert said == "model states: 12 blocks on the SSDs; actors move those on the SSDs just in time"


def test_states_elsewhere_are_said_to_be_there() -> None:
    assert states_in_words({"states_on_ssd": 0, "states_on_host": 0, "states_on_gpu": 12}) == (
        "model states: 12 blocks on the device"
    )
    assert states_in_words({"states_on_ssd": 7, "states_on_host": 5, "states_on_gpu": 0}).startswith(
        "model states: 7 blocks on the SSDs, 5 blocks in host memory; "
    )
