"""How many bytes of activations to swap out of the device, the rest being computed again: Ratel's Algorithm 1."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from windlass.planner.cost import LayerProfile, ModelProfile


class Case(StrEnum):
    """How a step's time goes with the swapped amount."""

    LEAST = "least"  # 1: it only rises, as links are the bottleneck
    ALL = "all"  # 2: it falls until nothing that takes operations is left; the device's compute is the bottleneck
    BETWEEN = "between"  # 3: it falls, then rises


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Activations that are swapped, or computed again, together."""

    nbytes: int
    num_flops: int  # to compute them again


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapAmount:
    """What Algorithm 1 finds."""

    nbytes: int  # swapped, those between layers included
    num_flops: int  # computed again
    iteration_s: float
    case: Case


def candidates_of(profile: ModelProfile) -> list[Candidate]:
    """All activations within layers. What an operator computes that saves nothing counts for the next that does."""
    return [candidate for layer in profile.layers for candidate in _of_layer(layer)]


def by_benefit(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that spare the most operations a byte first; equals in the order given.

    Source: Ratel (arXiv 2403.06504), equation 6.
    """
    return sorted(candidates, key=lambda each: each.num_flops / each.nbytes, reverse=True)


def best_swap(
    candidates: Sequence[Candidate],
    iteration_s: Callable[[int, int], float],
    *,
    least_nbytes: int = 0,
    most_nbytes: int | None = None,
) -> SwapAmount:
    """The amount with the shortest step.

    `iteration_s`: seconds of a step by the bytes swapped and the operations computed again; convex in the bytes, as
    both stages are the slowest of links and compute. `least_nbytes`: the activations between layers, which are always
    swapped, as a layer is computed again from them. `most_nbytes`: no more than that.

    Source: Ratel (arXiv 2403.06504), section IV-D, Algorithm 1. There the activations between layers are among the
    candidates, and the loop goes on until it is past their amount.
    """
    nbytes, num_flops = least_nbytes, sum(each.num_flops for each in candidates)
    best_nbytes, best_num_flops, best_s = nbytes, num_flops, iteration_s(nbytes, num_flops)
    for each in by_benefit(candidates):
        nbytes, num_flops = nbytes + each.nbytes, num_flops - each.num_flops
        if most_nbytes is not None and nbytes > most_nbytes:
            break
        found_s = iteration_s(nbytes, num_flops)
        if found_s >= best_s:
            break
        best_nbytes, best_num_flops, best_s = nbytes, num_flops, found_s
    case = Case.LEAST if best_nbytes == least_nbytes else Case.BETWEEN if best_num_flops else Case.ALL
    return SwapAmount(nbytes=best_nbytes, num_flops=best_num_flops, iteration_s=best_s, case=case)


def recomputed_flops(candidates: Sequence[Candidate], nbytes: int) -> int:
    """Operations computed again where so many bytes of candidates are swapped, the best first, the last one in part.

    Source: Ratel (arXiv 2403.06504), equation 7.
    """
    num_flops = float(sum(each.num_flops for each in candidates))
    for each in by_benefit(candidates):
        part = min(1.0, nbytes / each.nbytes)
        num_flops -= part * each.num_flops
        nbytes -= each.nbytes
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
