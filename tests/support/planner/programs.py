"""Random integer programs, and their best assignments by a search through all."""

import itertools
from collections.abc import Iterator

import hypothesis.strategies as st

from windlass.planner.solver.program.integer_program import (
    Assignment,
    BlockGroup,
    Bound,
    Buffer,
    Option,
    Outcome,
    Overflow,
    Program,
    outcome_of,
)

NUM_PARTS, NUM_TIERS, NUM_BUFFERS = 3, 3, 2
SECONDS = st.integers(0, 20).map(lambda tenths: tenths / 10)
NBYTES = st.integers(0, 12).map(lambda gigabytes: gigabytes * 1e9)


def options(nbytes: st.SearchStrategy[float] = NBYTES, *, num_buffers: int = NUM_BUFFERS) -> st.SearchStrategy[Option]:
    """Options with these bytes on each tier, which use so many of the buffers."""
    return st.builds(
        lambda seconds, nbytes, share, buffered: Option(
            seconds=tuple(seconds),
            nbytes=tuple(nbytes),
            movable_nbytes=nbytes[1] * share,
            buffered_nbytes=tuple(buffered),
        ),
        st.lists(SECONDS, min_size=NUM_PARTS, max_size=NUM_PARTS),
        st.lists(nbytes, min_size=NUM_TIERS, max_size=NUM_TIERS),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.lists(nbytes, min_size=num_buffers, max_size=num_buffers).map(
            lambda used: [*used, *[0.0] * (NUM_BUFFERS - num_buffers)]
        ),
    )


WEIGHTS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=NUM_PARTS, max_size=NUM_PARTS)


def programs(*others: st.SearchStrategy[BlockGroup], most_groups: int = 3) -> st.SearchStrategy[Program]:
    """Programs with up to so many groups of few options, and these."""
    return st.builds(
        lambda blocks, others, seconds, limits, bounds, constants, overflow, most: Program(
            blocks=(*blocks, *others),
            seconds=tuple(seconds),
            nbytes=(0.0, 1e9, 0.0),
            limits=tuple(limits),
            bounds=tuple(Bound(weights=tuple(w), constant_s=c) for w, c in zip(bounds, constants, strict=False)),
            overflow=overflow,
            buffers=(Buffer(tier=0, most_nbytes=most[0]), Buffer(tier=1, most_nbytes=most[1])),
        ),
        st.lists(
            st.builds(
                lambda n, w: BlockGroup(count=n, options=tuple(w)),
                st.integers(1, 4),
                st.lists(options(), min_size=1, max_size=3),
            ),
            min_size=1,
            max_size=most_groups,
        ),
        st.tuples(*others),
        st.lists(SECONDS, min_size=NUM_PARTS, max_size=NUM_PARTS),
        st.lists(st.integers(0, 40).map(lambda n: n * 1e9), min_size=NUM_TIERS, max_size=NUM_TIERS),
        st.lists(
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=NUM_PARTS, max_size=NUM_PARTS), min_size=1, max_size=4
        ),
        st.lists(SECONDS, min_size=4, max_size=4),
        st.none()
        | st.builds(
            lambda seconds: Overflow(source=1, target=2, seconds=tuple(each / 1e9 for each in seconds)),
            st.lists(SECONDS, min_size=NUM_PARTS, max_size=NUM_PARTS),
        ),
        st.lists(NBYTES, min_size=NUM_BUFFERS, max_size=NUM_BUFFERS),
    )


def splits(count: int, num_options: int) -> Iterator[tuple[int, ...]]:
    if num_options == 1:
        yield (count,)
        return
    for first in range(count + 1):
        for rest in splits(count - first, num_options - 1):
            yield (first, *rest)


def best_of_all(program: Program) -> Outcome | None:
    """Searches all solutions. It moves the minimum that fits, because moving alone never saves time."""
    best = None
    for counts in itertools.product(*(splits(group.count, len(group.options)) for group in program.blocks)):
        moved = 0.0
        if (overflow := program.overflow) is not None:
            unmoved = outcome_of(program, Assignment(counts=counts, moved_nbytes=0.0))
            moved = max(0.0, unmoved.nbytes[overflow.source] - program.limits[overflow.source])
            movable = sum(
                n * option.movable_nbytes
                for group, ns in zip(program.blocks, counts, strict=True)
                for option, n in zip(group.options, ns, strict=True)
            )
            if moved > movable:
                continue
        outcome = outcome_of(program, Assignment(counts=counts, moved_nbytes=moved))
        if fits(program, outcome) and (best is None or outcome.cost < best.cost):
            best = outcome
    return best


def beside_the_best(program: Program, found: Assignment | None) -> tuple[Outcome, Outcome] | None:
    """The outcomes of the best assignment and of the one that was found, which fits. None: neither exists."""
    best = best_of_all(program)
    assert (best is None) == (found is None)
    if best is None or found is None:
        return None
    assert [sum(counts) for counts in found.counts] == [group.count for group in program.blocks]
    outcome = outcome_of(program, found)
    assert fits(program, outcome)
    return best, outcome


def fits(program: Program, outcome: Outcome) -> bool:
    return all(used <= limit * (1 + 1e-6) + 1 for used, limit in zip(outcome.nbytes, program.limits, strict=True))
