"""The step time of a job in stages, from the times of each stage alone: docs/decisions/0053-plans-over-boxes.md.

A *round* is one group of micro-batches for each GPU of a box. All boxes have the same rounds.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from windlass.actors.worker_policy import num_groups_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The seconds of a stage, if its box waited for no other."""

    round_s: float  # of a round's forward and backward pass, by the resource that takes longest
    computed_s: float  # of that, by the GPUs alone
    # The part of `computed_s` beside which updates run: the first forward pass and, if updates do not wait for the norm
    # of all gradients, the last backward pass.
    beside_updates_s: float
    updates_s: float  # of all updates of a step
    first_update_s: float  # from the last gradient to the new params of the first block
    alone_s: float  # of a step of the box's blocks alone: no step of the job takes less


class Limit(StrEnum):
    """A part of a step. The longest one limits the step."""

    BOX = "box"  # the work of the busiest box
    BUBBLE = "bubble"  # that box waits until the first round reaches it, and until the last one has left the others
    NETWORK = "network"  # that box waits for the network
    UPDATES = "updates"  # beside which no box computes


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The boxes of a job in the order of their stages, with the rounds that pass through them.

    `crossing_nbytes`: hidden states of a round; as many bytes return as gradients. `network_bytes`: the rate of each
    box's network card, in bytes per second each way. `ranks`: GPUs of each box; empty: as many in all.
    `shared_params_nbytes`: params of the embedding that the head uses, which the first box sends to the last one once a
    step. `shared_sum_nbytes`: their gradient, which it sends back.
    """

    stages: tuple[StageTimes, ...]
    num_rounds: int
    crossing_nbytes: float
    network_bytes: tuple[float, ...]
    ranks: tuple[int, ...] = ()
    shared_params_nbytes: float = 0.0
    shared_sum_nbytes: float = 0.0

    @cached_property
    def step_s(self) -> float:
        """The time of a step in steady state."""
        return sum(self.parts_s.values())

    @cached_property
    def parts_s(self) -> dict[Limit, float]:
        """The seconds of each part of a step. Their sum is the step."""
        alone = {Limit.BOX: max(stage.alone_s for stage in self.stages)}
        passes = self._passes_s([stage.round_s for stage in self.stages])
        # Copies and reads go on beside updates, so only compute waits for these.
        updated = self._passes_s([stage.computed_s for stage in self.stages]) | {Limit.UPDATES: self.tail_s}
        longest = max((alone, passes, updated), key=lambda parts: sum(parts.values()))
        return dict.fromkeys(Limit, 0.0) | longest

    @cached_property
    def crossings_s(self) -> tuple[float, ...]:
        """The seconds in which a round's hidden states pass from each box but the last to the next one."""
        return tuple(self.crossing_nbytes / min(pair) for pair in itertools.pairwise(self.network_bytes))

    @cached_property
    def transfer_period_s(self) -> float:
        """The time of a round at the slowest network card. A box between two others sends to both, and receives."""
        last = len(self.network_bytes) - 1
        return max(
            ((box > 0) + (box < last)) * self.crossing_nbytes / rate for box, rate in enumerate(self.network_bytes)
        )

    def _passes_s(self, rounds_s: Sequence[float]) -> dict[Limit, float]:
        """Returns the seconds of all rounds, which take `rounds_s` on each box: the first round, then one a period."""
        slowest_s = max(rounds_s)
        period_s = max(slowest_s, self.transfer_period_s, self._return_period_s(rounds_s))
        return {
            Limit.BOX: self.num_rounds * slowest_s,
            Limit.BUBBLE: sum(rounds_s) - slowest_s,
            Limit.NETWORK: 2 * sum(self.crossings_s)
            + (self.num_rounds - 1) * (period_s - slowest_s)
            + self._shared_wait_s(sum(rounds_s)),
        }

    def _shared_wait_s(self, round_s: float) -> float:
        """Returns the seconds in which compute waits for shared params and their gradient.

        The params move beside the first round's forward pass, about a third of it, and the gradient beside the last
        round's backward pass. `round_s`: of a round on all boxes.
        """
        rate = min(self.network_bytes[0], self.network_bytes[-1])
        to_head_s, back_s = self.shared_params_nbytes / rate, self.shared_sum_nbytes / rate
        crossings_s = sum(self.crossings_s)
        return max(0.0, to_head_s - round_s / 3 - crossings_s) + max(0.0, back_s - round_s * 2 / 3 - crossings_s)

    @cached_property
    def sent_nbytes(self) -> tuple[float, ...]:
        """The bytes that each box's network card sends in a step."""
        last = len(self.network_bytes) - 1
        hidden_nbytes = self.num_rounds * self.crossing_nbytes
        shared_nbytes = {0: self.shared_params_nbytes, last: self.shared_sum_nbytes}
        return tuple(
            ((box > 0) + (box < last)) * hidden_nbytes + shared_nbytes.get(box, 0.0) for box in range(last + 1)
        )

    @property
    def sending_s(self) -> float:
        """The seconds in which the busiest network card sends in a step."""
        return max(nbytes / rate for nbytes, rate in zip(self.sent_nbytes, self.network_bytes, strict=True))

    def _return_period_s(self, rounds_s: Sequence[float]) -> float:
        """Returns the time between rounds that follows from the number of rounds in flight.

        A stage begins some rounds before the first one has come back from the later stages. Meanwhile a network card
        between two other boxes also moves other rounds: for a share x / period of the time of a crossing, which takes x
        alone. Then both have half of its rate. A box with fewer GPUs than others passes its part of a round on at once.
        """
        period_s, return_s, shared_s2 = 0.0, 0.0, 0.0
        ranks = self.ranks or (1,) * len(rounds_s)
        parts = [num_ranks / max(ranks) for num_ranks in ranks]  # of a round, that a box computes at once
        for stage in reversed(range(len(rounds_s))):
            return_s += parts[stage] * rounds_s[stage]
            if stage < len(rounds_s) - 1:
                crossing_s = self.crossings_s[stage]
                there_and_back = parts[stage] + parts[stage + 1]
                return_s += there_and_back * crossing_s
                if len(rounds_s) > 2:
                    shared_s2 += there_and_back * crossing_s * crossing_s
            # Own rounds of the box, N - b of N boxes with as many GPUs; in rounds of the boxes with most GPUs.
            num_in_flight = parts[stage] * num_groups_ahead(stage, ranks, self.num_rounds * max(ranks))
            if self.num_rounds > num_in_flight:
                # The period p is (return_s + shared_s2 / p) / num_in_flight.
                alone_s = return_s / num_in_flight
                shared_period_s = (alone_s + math.sqrt(alone_s**2 + 4 * shared_s2 / num_in_flight)) / 2
                period_s = max(period_s, shared_period_s)
        return period_s

    @property
    def tail_s(self) -> float:
        """The time of updates beside which no pass runs.

        A stage's updates run beside its own passes and those of the stages before. These come first in the next step,
        and last in this one.
        """
        beside_s, tail_s = 0.0, self.stages[0].first_update_s
        for stage in self.stages:
            beside_s += stage.beside_updates_s
            tail_s = max(tail_s, stage.updates_s - beside_s)
        return tail_s

    @property
    def limit(self) -> Limit:
        """The part that limits the step. If the network cards are slower than all boxes, it is the network."""
        if self.parts_s[Limit.NETWORK] and self.transfer_period_s > max(stage.round_s for stage in self.stages):
            return Limit.NETWORK
        return max(Limit, key=lambda part: self.parts_s[part])

    @property
    def waiting_share(self) -> float:
        """The share of a step in which the busiest box waits."""
        return 1 - self.parts_s[Limit.BOX] / self.step_s

    @property
    def busiest_box(self) -> int:
        """The index of the busiest box."""
        work_s = [max(stage.alone_s, self.num_rounds * stage.round_s) for stage in self.stages]
        return work_s.index(max(work_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWork:
    """The least seconds of a box for a step of the whole model, if it had room for it."""

    step_s: float
    passes_s: float  # without updates
    copied_s: float  # in which params and sums are copied to the device, if no states rest there
    resident_share: float  # of these seconds, that states on the device save at most


def least_step_s(boxes: Sequence[LeastWork], num_rounds: int) -> float:
    """Returns a lower bound of the step time for all divisions of a model's blocks over these boxes."""
    passes_s = [box.passes_s for box in boxes]
    copied_s = [box.copied_s for box in boxes]
    not_resident = max(0.0, 1 - math.fsum(box.resident_share for box in boxes))
    return max(
        _balanced_s([box.step_s for box in boxes]),
        # The first round passes through all blocks. The others take no less than if boxes shared them evenly.
        (min(passes_s) + (num_rounds - 1) * _balanced_s(passes_s)) / num_rounds,
        not_resident * (min(copied_s) + (num_rounds - 1) * _balanced_s(copied_s)) / num_rounds,
    )


def _balanced_s(seconds: Sequence[float]) -> float:
    """Returns the time of work that boxes share so that all end together. `seconds`: of each box for all the work."""
    return 1 / math.fsum(1 / each for each in seconds) if all(seconds) else 0.0
