"""Deals the groups of a step's micro-batches to the job's ranks, its GPU workers, in turn.

Ranks compute successive groups at the same time. In the backward pass each rank goes on with the sums that the rank of
the group before has left. So results do not depend on the number of ranks, as they do not depend on that of groups.
"""


def rank_of(group: int, num_ranks: int) -> int:
    """Returns the rank that computes a group of a step, or of an evaluation."""
    return group % num_ranks


def round_of(group: int, num_ranks: int) -> int:
    """Returns the round of a group: how many groups its rank has computed before it."""
    return group // num_ranks


def num_ranks_in_round(round_index: int, num_groups: int, num_ranks: int) -> int:
    """Returns how many ranks compute a group in a round, the first ones. In the last round it may be fewer than all."""
    return max(0, min(num_ranks, num_groups - round_index * num_ranks))


def ends_rank(group: int, num_groups: int, num_ranks: int) -> bool:
    """Returns whether a group is the last one of its rank."""
    return group + num_ranks >= num_groups


def has_group(rank: int, num_groups: int) -> bool:
    """Returns whether a rank computes a group of each step. One that does not computes groups of evaluations only."""
    return rank < num_groups
