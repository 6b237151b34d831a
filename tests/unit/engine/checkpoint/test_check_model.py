import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import odd_models
from tests.support.engine.folders import make_config, make_model_folder
from tests.support.engine.odd_models import odd_config
from windlass.engine.checkpoint import check_model as module
from windlass.engine.checkpoint.check_model import check_model, main
from windlass.engine.checkpoint.reader import CheckpointError
from windlass.engine.model.layout import ModelLayout, UnsupportedArchitectureError
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.storage.ids import Precision


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, Any]:
    """Calls the program in this process and returns its result."""
    result = folder.parent / "result.json"
    layout = folder.parent / "layout.json"
    argv = ["check_model", "--model-dir", str(folder), "--layout-file", str(layout), "--result", str(result), *options]
    monkeypatch.setattr(sys, "argv", argv)
    main()
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_the_layout_is_the_partitions(folder: Path, tmp_path: Path) -> None:
    model = make_model_folder(folder, "qwen2-tied")
    found = check_model(folder, Precision.BF16, with_weights=True, layout_file=tmp_path / "layout.json")
    assert found == {
        "num_params": model.num_parameters(),
        "num_blocks": 4,
        "architecture": "Qwen2ForCausalLM",
        "warnings": [],
    }
    expected = Partition(build_meta_model(make_config("qwen2-tied"), Precision.BF16)).layout
    assert ModelLayout.from_json((tmp_path / "layout.json").read_text()) == expected


def test_missing_weights_are_refused_unless_the_job_makes_its_own(folder: Path, tmp_path: Path) -> None:
    make_model_folder(folder, "llama")
    (folder / "model.safetensors").unlink()
    layout_file = tmp_path / "layout.json"
    with pytest.raises(CheckpointError):
        check_model(folder, Precision.FP32, with_weights=True, layout_file=layout_file)
    assert not layout_file.exists()
    assert check_model(folder, Precision.FP32, with_weights=False, layout_file=layout_file)["num_blocks"] == 4


def test_an_unsupported_architecture_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_config", lambda _: odd_config(odd_models.CodeBetweenLayersModel))
    with pytest.raises(UnsupportedArchitectureError):
        check_model(folder, Precision.FP32, with_weights=False, layout_file=tmp_path / "layout.json")
    assert not (tmp_path / "layout.json").exists()
    error = run_main(monkeypatch, folder, "--random-weights")["error"]
    assert (error["code"], error["param"]) == ("model_not_supported", "model")
    assert "CodeBetweenLayersForCausalLM has code between layer 0 and layer 1" in error["message"]


def test_a_good_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model_folder(folder, "gpt2")
    found = run_main(monkeypatch, folder, "--precision", "fp32")
    assert (found["ok"], found["architecture"]) == (True, "GPT2LMHeadModel")


def test_weights_of_another_model_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model_folder(folder, "gpt2")
    make_config("llama").save_pretrained(folder)
    found = run_main(monkeypatch, folder)
    assert found["ok"] is False
    assert found["error"]["code"] == "invalid_model"
    assert "no place for the tensors: transformer.h.0.attn.c_attn.bias" in found["error"]["message"]


@pytest.mark.parametrize(
    "config",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"model_type": "no such type"}',
        '{"model_type": "t5"}',
        '{"model_type": "qwen2", "hidden_size": "wide"}',
        '{"model_type": "qwen2", "hidden_size": 30, "num_attention_heads": 4}',
        '{"model_type": "qwen2", "num_hidden_layers": -1}',
        '{"model_type": "qwen2", "vocab_size": 0}',
    ],
)
def test_whatever_the_config_says_there_is_an_answer(
    config: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if config is not None:
        (folder / "config.json").write_text(config)
    found = run_main(monkeypatch, folder, "--random-weights")
    assert found["ok"] is False
    assert found["error"]["code"] in ("invalid_model", "model_not_supported")
    assert len(found["error"]["message"]) > 20
