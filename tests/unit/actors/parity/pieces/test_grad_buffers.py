"""One gradient buffer on the device instead of two: the same bits, in less memory."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import exported_params, has_direct_io, losses_of, make_partition, make_spec
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.device.buffer_pool import BufferClass, DeviceBuffers
from windlass.engine.memory_plan.plan import Placement
from windlass.storage.ids import Precision

CASES = list(product((None, 0.5), (False, True), (1, 2), (Precision.BF16, Precision.FP32)))
# Any two values of the factors occur together in one of these cases.
QUICK = [CASES[i] for i in (0b0000, 0b0111, 0b1011, 0b1101, 0b1110)]


def run(
    root: Path, monkeypatch: pytest.MonkeyPatch, num_grad_buffers: int, **changes: Any
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """The losses, the params, and the number of elements in all gradient buffers."""
    spec = make_spec(root, placement=Placement(num_grad_buffers=num_grad_buffers), total_steps=3, **changes)
    made: dict[str, dict[BufferClass, int]] = {}
    make = DeviceBuffers.__init__

    def note(self: DeviceBuffers, device: Any, planned: Any, *, name: str, **options: Any) -> None:
        made[name] = dict(planned)
        make(self, device, planned, name=name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceBuffers, "__init__", note)
        outcome = run_local(
            spec, partition=make_partition(spec), poison_released=True, direct=has_direct_io(Path(spec.model_dir))
        )
    assert outcome["status"] == "succeeded", outcome
    numel = sum(numel * count for (numel, _), count in made["gradients"].items())
    return losses_of(spec), exported_params(spec), numel


@pytest.mark.short("0.5-True-2-bf16")
@pytest.mark.parametrize(
    ("clip_norm", "tied", "num_microbatches", "precision"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in CASES],
)
def test_one_buffer_gives_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clip_norm: float | None,
    tied: bool,
    num_microbatches: int,
    precision: Precision,
) -> None:
    changes: dict[str, Any] = {
        "clip_norm": clip_norm,
        "tied": tied,
        "num_microbatches": num_microbatches,
        "precision": precision,
    }
    losses, params, numel = run(tmp_path / "one", monkeypatch, 1, **changes)
    others = run(tmp_path / "two", monkeypatch, 2, **changes)
    assert losses == others[0]
    assert [name for name, param in params.items() if not torch.equal(param, others[1][name])] == []
    assert numel < others[2]
