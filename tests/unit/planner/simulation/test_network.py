"""The simulated network: shares of cards, priorities, windows and cuts."""

import pytest

from windlass.actors.messages import Crossing, Phase
from windlass.planner.simulation.clock import Clock, Future
from windlass.planner.simulation.network import NetworkRates, SimulatedNetwork, fair_rates
from windlass.storage.ids import BlockIndex, Step


class Bench:
    """A network of three boxes, 10 bytes a second each, with the times of arrivals."""

    def __init__(self, **rates: float) -> None:
        self.clock, self.used = Clock(), list[tuple[int, float]]()
        given = NetworkRates(**{"card_bytes": (10.0, 10.0, 10.0), **rates})  # type: ignore[arg-type]
        self.network = SimulatedNetwork(self.clock, given, lambda box, seconds: self.used.append((box, seconds)))
        self.arrived_s, self.taken_s = dict[str, float](), dict[str, float]()

    def move(self, name: str, source: int, target: int, nbytes: float, *, is_shared: bool = False) -> None:
        crossing = Crossing(Step(1), Phase.HEAD, BlockIndex(0), len(self.arrived_s), hash(name), is_shared)
        self._note(self.arrived_s, name, self.network.pull(source, target, crossing))
        self._note(self.taken_s, name, self.network.offer(source, target, crossing, nbytes))

    def _note(self, times: dict[str, float], name: str, event: Future) -> None:
        event.then(lambda: times.update({name: self.clock.now}))


def test_shares_are_fair_and_use_what_others_leave() -> None:
    # Card 0 sends twice at 6; the way 2 to 1 uses what is left at card 1.
    assert fair_rates([(0, 1), (0, 2), (2, 1)], [12.0, 20.0, 30.0], most=1e9) == {(0, 1): 6, (0, 2): 6, (2, 1): 14}
    assert fair_rates([(0, 1), (1, 0)], [12.0, 20.0], most=1e9) == {(0, 1): 12, (1, 0): 12}
    assert fair_rates([(0, 1), (0, 2)], [12.0, 20.0, 3.0], most=1e9) == {(0, 1): 9, (0, 2): 3}
    assert fair_rates([(0, 1), (2, 1)], [12.0, 20.0, 30.0], most=5.0) == {(0, 1): 5, (2, 1): 5}


def test_two_ways_share_a_card_while_both_are_in_use() -> None:
    bench = Bench()
    bench.move("long", 0, 1, 100)
    bench.move("short", 0, 2, 20)
    bench.clock.run()
    # Both have 5 bytes a second for 4 s; then the long one has 10.
    assert bench.arrived_s == {"short": pytest.approx(4), "long": pytest.approx(12)}


def test_both_directions_have_their_own_rate() -> None:
    bench = Bench()
    bench.move("there", 0, 1, 100)
    bench.move("back", 1, 0, 100)
    bench.clock.run()
    assert bench.arrived_s == {"there": pytest.approx(10), "back": pytest.approx(10)}


def test_hidden_states_overtake_shared_params() -> None:
    bench = Bench()
    bench.move("shared", 0, 1, 100, is_shared=True)
    bench.clock.after(1, lambda: bench.move("hidden", 0, 1, 20))
    bench.clock.after(2, lambda: bench.move("later", 0, 1, 20))
    bench.clock.run()
    assert bench.arrived_s == {"hidden": pytest.approx(3), "later": pytest.approx(5), "shared": pytest.approx(14)}


def test_a_round_trip_passes_before_and_the_window_limits_the_rate() -> None:
    bench = Bench(round_trip_s=2.0, window_nbytes=4)  # 2 bytes a second
    bench.move("all", 0, 1, 100)
    bench.clock.run()
    # The offer and the request take a second each, and the last byte one more. The sender hears of it after another.
    assert bench.arrived_s == {"all": pytest.approx(2 + 50 + 1)}
    assert bench.taken_s == {"all": pytest.approx(2 + 50 + 1 + 1)}


def test_transfers_and_messages_wait_while_a_connection_is_cut() -> None:
    bench, heard = Bench(), list[float]()
    bench.move("cut", 0, 1, 100)
    bench.move("other", 0, 2, 50)
    bench.clock.after(2, lambda: bench.network.cut(0, 1))
    bench.clock.after(3, lambda: bench.network.send(1, 0, lambda: heard.append(bench.clock.now)))
    bench.clock.after(9, lambda: bench.network.restore(0, 1))
    bench.clock.run()
    # 10 bytes of each in 2 s. The other way then has the card alone: 40 bytes in 4 s.
    assert bench.arrived_s == {"other": pytest.approx(6), "cut": pytest.approx(9 + 9)}
    assert heard == [9]


def test_both_boxes_use_cores_for_what_passes() -> None:
    bench = Bench(cpu_s_per_byte=0.01)
    bench.move("all", 1, 2, 100)
    bench.clock.run()
    assert bench.used == [(1, 1.0), (2, 1.0)]
