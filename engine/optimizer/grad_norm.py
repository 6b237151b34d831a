"""The squared norm of a gradient, which also says whether all of it is finite: one read, no temporaries of its size.

Rows are reduced in fp32, short enough to be exact to some 1e-7, and summed in fp64. Rows whose sum overflows in fp32
are told from those that hold an infinity by doing them again in fp64. Measured on two cores, 128 Mi elements: 11 ms in
fp32, 16 in bf16, 13 in fp16; `isinf().any() or isnan().any()` takes 300, 280 and 240. torch's own
`vector_norm(dtype=torch.float64)` copies the whole tensor on a CPU, and in fp32 is off by 3 percent at this length.
"""

import torch

# Rows of one length, whatever the threads, so that the sum does not depend on these.
_ROW_NUMEL = 2**10
# 2 MiB in fp32, which stays in the caches.
_BLOCK_NUMEL = 2**19
# torch sums fewer numbers than this in one thread.
_SERIAL_NUMEL = 2**14


def squared_norm(grad: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a flat tensor (bf16, fp16, fp32): fp64, 0-dim, on its device; finite if all elements are.

    It is NaN if any element is, else infinite if any is. The same bits for the same tensor, with any number of threads.
    Takes 2 MiB and 13 bytes per 1024 elements beside it. Squares below 1e-38 may count as zero. On a GPU nothing waits
    for the result.
    """
    if grad.device.type != "cpu":
        norm: torch.Tensor = torch.linalg.vector_norm(grad, dtype=torch.float64)
        return norm.square()
    if not grad.numel():
        return torch.zeros((), dtype=torch.float64)
    norms = torch.empty(-(-grad.numel() // _ROW_NUMEL))
    if grad.dtype is torch.float32:
        _row_norms(grad, norms)
    else:
        scratch = torch.empty(min(_BLOCK_NUMEL, grad.numel()))
        for block, norms_of_block in zip(
            torch.split(grad, _BLOCK_NUMEL), torch.split(norms, _BLOCK_NUMEL // _ROW_NUMEL), strict=True
        ):
            _row_norms(scratch[: block.numel()].copy_(block), norms_of_block)
    squares = norms.to(torch.float64).square()
    if squares.isnan().any():  # also where a row before it holds an infinity
        return torch.full((), torch.nan, dtype=torch.float64)
    for row in (~torch.isfinite(norms)).nonzero().flatten().tolist():
        squares[row] = grad[row * _ROW_NUMEL : (row + 1) * _ROW_NUMEL].to(torch.float64).square().sum()
        if not torch.isfinite(squares[row]):
            return squares[row].clone()
    return torch.stack([part.sum() for part in torch.split(squares, _SERIAL_NUMEL)]).sum()


def _row_norms(values: torch.Tensor, norms: torch.Tensor) -> None:
    """Write the norms of fp32 rows, the last of which may be shorter."""
    num_rows = values.numel() // _ROW_NUMEL
    whole = num_rows * _ROW_NUMEL
    torch.linalg.vector_norm(values[:whole].view(num_rows, _ROW_NUMEL), dim=1, out=norms[:num_rows])
    if whole < values.numel():
        torch.linalg.vector_norm(values[whole:], out=norms[num_rows])
