"""The loop of the README trains a causal language model of transformers."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.actors.offload_models import adamw
from tests.support.training import has_direct_io, keep_calibration

pytestmark = pytest.mark.usefixtures("one_thread")
_README = Path(__file__).parents[4] / "README.md"


def test_readme_loop_trains_a_model_with_a_key_value_cache(tmp_path: Path) -> None:
    (code,) = re.findall(r"^    import windlass\n(?:    .*\n|\n)+", _README.read_text(), re.MULTILINE)
    settings = f'ssd_dirs=[{str(tmp_path)!r}], kernel="fused", device="cpu", direct_io={has_direct_io(tmp_path)}'
    keep_calibration(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes))
    ids = torch.arange(8)[None]
    loader = [{"input_ids": ids, "labels": ids}] * 2
    names: dict[str, Any] = {"model": model, "optimizer": adamw(model), "loader": loader}
    exec(dedent(code).replace('ssd_dirs=["/nvme0/windlass"]', settings), names)
    names["optimizer"].close()
    assert names["optimizer"].grad_norm > 0
