"""How a layer's matrices are cut into pieces, where two whole layers do not fit on the device.

A layer's flat vector begins with its matrices, in the order in which its modules hold them. They come to the device in
pieces; norms and biases, which end the vector and are small, come as a whole.
"""

import itertools
from collections.abc import Sequence

# One piece is computed with while the next one comes.
NUM_PIECE_BUFFERS = 2


def cut_layers(layers: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, ...]]:
    """Where each layer is cut: the first element of each of its pieces, and the end of the last.

    `layers`: of each layer, per module that holds matrices itself, their numbers of elements, in the order of the flat
    vector. No matrix is cut, so the largest of all is as large as a piece gets; others are joined up to that, those of
    one module first.
    """
    limit = max((numel for modules in layers for module in modules for numel in module), default=0)
    return [_cut(modules, limit) for modules in layers]


def _cut(modules: Sequence[Sequence[int]], limit: int) -> tuple[int, ...]:
    bounds, stop = [0], 0
    for module in modules:
        for numel in [sum(module)] if sum(module) <= limit else module:
            if stop + numel - bounds[-1] > limit:
                bounds.append(stop)
            stop += numel
    return (*bounds, stop)


def largest_piece(layers: Sequence[Sequence[int]]) -> int:
    """Elements of the largest piece of layers that are cut so: the size of a buffer."""
    return max((stop - start for bounds in layers for start, stop in itertools.pairwise(bounds)), default=0)
