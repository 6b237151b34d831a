"""The depths of queues that a plan may have. They are fixed numbers, so that a better machine has no fewer of them."""

import functools
import itertools
from collections.abc import Iterator

from windlass.engine.memory_plan import (
    ACTIVATION_PART_SLOTS,
    FETCH_DEPTH,
    MIN_STATE_DEPTH,
    STAGED_ACTIVATIONS,
    QueueDepths,
)

# Numbers of SSDs that queues may be deep enough for. A plan may use fewer queues than there are SSDs, to save memory.
_NUMBERS_OF_SSDS = (1, 4, 16, 64)
# Transfers for each SSD: one in progress, one queued. About half of the transfers wait for an SSD that is busy with
# another one.
_SPARE = 2
# The same for states, which also wait for their update: the more, the less SSDs and optimizers wait for each other.
_SPARE_STATES = (8, 4, 2)


def depths_for(
    num_ssds: int, *, num_optimizers: int, leaving_nbytes: int, spare_states: int = _SPARE_STATES[-1]
) -> QueueDepths:
    """Returns depths at which so many SSDs, or the links behind them, are always busy, whatever their rates.

    A depth is throughput times latency of one transfer. If the SSDs are the slower ones, a transfer takes at most twice
    its time at an SSD. If the link is, at most one transfer for each SSD waits for it. `spare_states`: chunks of states
    for each SSD.
    """
    return QueueDepths(
        params=max(FETCH_DEPTH, 2 * _SPARE * num_ssds),
        states=-(-spare_states * num_ssds // num_optimizers) + 1,
        staged_activations=max(STAGED_ACTIVATIONS, 2 * _SPARE * num_ssds * ACTIVATION_PART_SLOTS),
        leaving_nbytes=leaving_nbytes,
    )


@functools.lru_cache(maxsize=64)
def depths_to_try(num_ssds: int, *, num_optimizers: int, leaving_nbytes: int) -> tuple[QueueDepths, ...]:
    """Returns depths for a machine, the deepest first. The last ones are the least that a job runs with."""
    return tuple(_depths_to_try(num_ssds, num_optimizers, leaving_nbytes))


def _depths_to_try(num_ssds: int, num_optimizers: int, leaving_nbytes: int) -> Iterator[QueueDepths]:
    deepest = next((number for number in _NUMBERS_OF_SSDS if number >= num_ssds), _NUMBERS_OF_SSDS[-1])
    numbers = [number for number in reversed(_NUMBERS_OF_SSDS) if number <= deepest]
    for leaving, number, spare in itertools.product(dict.fromkeys((leaving_nbytes, 0)), numbers, _SPARE_STATES):
        yield depths_for(number, num_optimizers=num_optimizers, leaving_nbytes=leaving, spare_states=spare)
    yield QueueDepths(states=MIN_STATE_DEPTH, leaving_nbytes=0)
