"""Chooses how many bytes of activations to swap, with the rest recomputed: Ratel's Algorithm 1."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from windlass.planner.cost import LayerProfile, ModelProfile


class Case(StrEnum):
    """The shape of the step time as a function of the swapped amount."""

    LEAST = "least"  # 1: it only rises, because the links are the bottleneck
    ALL = "all"  # 2: it only falls until nothing is recomputed, because the device's compute is the bottleneck
    BETWEEN = "between"  # 3: it falls, then rises


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Activations that are swapped or recomputed together."""

    nbytes: int
    num_flops: int  # to recompute them


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapAmount:
    """The result of Algorithm 1."""

    nbytes: int  # swapped, inter-block activations included
    num_flops: int  # recomputed
    iteration_s: float
    case: Case


def candidates_of(profile: ModelProfile) -> list[Candidate]:
    """Returns all intra-block activations. Operators that save nothing count for the next one that does."""
    return [candidate for layer in profile.layers for candidate in _of_layer(layer)]


def by_benefit(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sorts by saved operations per byte, the highest first; equal ones keep their order.

    Source: Ratel (arXiv 2403.06504), equation 6.
    """
    return sorted(candidates, key=lambda candidate: candidate.num_flops / candidate.nbytes, reverse=True)


def best_swap(
    candidates: Sequence[Candidate],
    iteration_s: Callable[[int, int], float],
    *,
    least_nbytes: int = 0,
    most_nbytes: int | None = None,
) -> SwapAmount:
    """Returns the swapped amount with the shortest step.

    `iteration_s`: seconds of a step, by the bytes swapped and the operations recomputed. It must be convex in the
    bytes, as a maximum of link and compute times is. `least_nbytes`: the inter-block activations. They are always
    swapped, because layers are recomputed from them. `most_nbytes`: upper limit.

    Source: Ratel (arXiv 2403.06504), section IV-D, Algorithm 1. There the inter-block activations are among the
    candidates, and the loop continues until it has passed their amount.
    """
    nbytes, num_flops = least_nbytes, sum(candidate.num_flops for candidate in candidates)
    best_nbytes, best_num_flops, best_s = nbytes, num_flops, iteration_s(nbytes, num_flops)
    for candidate in by_benefit(candidates):
        nbytes, num_flops = nbytes + candidate.nbytes, num_flops - candidate.num_flops
        if most_nbytes is not None and nbytes > most_nbytes:
            break
        found_s = iteration_s(nbytes, num_flops)
        if found_s >= best_s:
            break
        best_nbytes, best_num_flops, best_s = nbytes, num_flops, found_s
    case = Case.LEAST if best_nbytes == least_nbytes else Case.BETWEEN if best_num_flops else Case.ALL
    return SwapAmount(nbytes=best_nbytes, num_flops=best_num_flops, iteration_s=best_s, case=case)


def recomputed_flops(candidates: Sequence[Candidate], nbytes: int) -> int:
    """Returns the operations recomputed if this many bytes of candidates are swapped, best first, the last one in part.

    Source: Ratel (arXiv 2403.06504), equation 7.
    """
    num_flops = float(sum(candidate.num_flops for candidate in candidates))
    for candidate in by_benefit(candidates):
        part = min(1.0, nbytes / candidate.nbytes)
        num_flops -= part * candidate.num_flops
        nbytes -= candidate.nbytes
        if nbytes <= 0:
            break
    return round(num_flops)


def _of_layer(layer: LayerProfile) -> Iterator[Candidate]:
    num_flops = 0
    for operator in layer.operators:
        num_flops += operator.num_flops
        if operator.is_saved and operator.nbytes:
            yield Candidate(nbytes=operator.nbytes, num_flops=num_flops)
            num_flops = 0
