"""Views of an arena share its bytes."""

from pathlib import Path

import torch

from windlass.engine.device.tensor_arena import TensorArena
from windlass.storage.ids import Span
from windlass.storage.memory.arena import Arena


def test_view_shares_bytes_of_arena_at_offset(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "windlass-test.arena", 8192, huge_pages=False)
    tensors = TensorArena.of(arena)
    view = tensors.view(4096, 3, torch.float32)
    view.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert tensors.memory.numel() == 8192
    assert bytes(arena.buffer(Span(4096, 12))) == view.numpy().tobytes()
    assert tensors.view(4100, 4, torch.bfloat16).view(torch.float32).tolist() == [2.0, 3.0]
    del tensors, view
    arena.close()
    arena.unlink()
