"""The device buffers computed from a bare shape are those that a job allocates."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.papers.largest_model import BareModel, device_memory
from tests.support.training import has_direct_io, make_partition, make_spec
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.device.buffer_pool import BufferClass, DeviceBuffers
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.streaming.params import PieceBuffers
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.profiling.model_profiler import config_of_shape, profile_config
from windlass.storage.ids import Precision

SEQUENCE_LENGTH = 48
GPT = ModelShape(num_layers=3, hidden_size=64, num_heads=4, vocab_size=128)
LLAMA = ModelShape(num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=128, vocab_size=128)


@pytest.mark.short("two matrices-whole-two resident", "tied-pieces-none resident", "two matrices-pieces-two resident")
@pytest.mark.usefixtures("unchecked_activations")
@pytest.mark.parametrize("resident", [(), (1, 2)], ids=["none resident", "two resident"])
@pytest.mark.parametrize("streams_layers", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["tied", "two matrices"])
def test_a_job_makes_these_buffers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: ModelShape,
    streams_layers: bool,
    resident: tuple[int, ...],
) -> None:
    nbytes: dict[str, int] = {"pieces": 0}
    make_buffers, make_pieces = DeviceBuffers.__init__, PieceBuffers.__init__

    def note_buffers(self: Any, device: Any, planned: dict[BufferClass, int], *, name: str) -> None:
        nbytes[name] = sum(numel * dtype.itemsize * number for (numel, dtype), number in planned.items())
        make_buffers(self, device, planned, name=name)

    def note_pieces(self: Any, device: Any, numel: int, dtype: torch.dtype, num_buffers: int) -> None:
        nbytes["pieces"] = numel * dtype.itemsize * num_buffers
        make_pieces(self, device, numel, dtype, num_buffers)

    monkeypatch.setattr(DeviceBuffers, "__init__", note_buffers)
    monkeypatch.setattr(PieceBuffers, "__init__", note_pieces)
    streamed = tuple(block for block in (1, 2, 3) if streams_layers and block not in resident)
    spec = make_spec(
        tmp_path,
        precision=Precision.BF16,
        total_steps=1,
        evaluate_every=None,
        num_validation_examples=0,
        placement=Placement(streamed_blocks=streamed, device_blocks=resident),
    )
    config = config_of_shape(shape, num_tokens=SEQUENCE_LENGTH)
    shutil.rmtree(spec.model_dir)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(spec.model_dir)
    outcome = run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded", outcome

    profile = profile_config(config, Precision.BF16, num_examples=4, num_tokens=SEQUENCE_LENGTH)
    bare = BareModel(shape=shape, profile=profile, num_head_tokens=10**6)
    found = device_memory(bare, streams_layers=streams_layers, resident=resident)
    assert found.params == nbytes["params"] + nbytes["pieces"]
    assert found.grads == nbytes["gradients"]
