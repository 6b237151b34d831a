"""Times of another box's clock."""

from windlass.actors.runtime.boxes.peer_clock import PeerClock


def test_the_fastest_message_gives_the_difference() -> None:
    clock = PeerClock()
    for sent_s, delay_s in ((1000.0, 0.5), (1001.0, 0.125), (1002.0, 0.25)):
        clock.heard(sent_s, sent_s - 900.0 + delay_s)
    assert clock.behind_s == -900.0 + 0.125


def test_the_difference_follows_a_clock_that_drifts() -> None:
    """The other clock is slower by 1 ms a second."""
    clock = PeerClock()
    for now_s in range(0, 600, 5):
        clock.heard(0.999 * now_s, float(now_s))
        assert 0 <= now_s - (0.999 * now_s + clock.behind_s) < 0.125


def test_an_estimate_that_is_older_than_both_windows_is_forgotten() -> None:
    clock = PeerClock()
    clock.heard(0.0, 10.0)
    clock.heard(1000.0, 1020.0)
    assert clock.behind_s == 20.0
