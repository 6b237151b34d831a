import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.core_model_loading import Transpose, WeightConverter

from tests.support.engine.folders import MARKED_TEMPLATE, make_config, make_model_folder, make_tokenizer
from tests.support.power_cut import PowerCut, files_of
from windlass.engine.checkpoint.atomic_folder import make_partial_folder
from windlass.engine.checkpoint.model_exporter import ExportError, ModelExporter
from windlass.engine.model.layout import ModelLayout
from windlass.engine.model.partition import Partition, build_meta_model, load_config
from windlass.storage.ids import ChunkKey, Precision
from windlass.storage.memory.capacity import InsufficientSpaceError

CHUNK_NUMEL = 700
NAMES = ("qwen2-tied", "qwen2", "llama", "gpt2", "mixtral")


def make_layout(name: str) -> ModelLayout:
    return Partition(build_meta_model(make_config(name), Precision.FP32), CHUNK_NUMEL).layout


def chunks(layout: ModelLayout, model: Any) -> list[tuple[ChunkKey, torch.Tensor]]:
    """The model's parameters as fp32 chunk slots, with other values behind each block's end."""
    params = dict(model.named_parameters())
    found = []
    for block in layout.blocks:
        flat = torch.full((layout.num_chunks(block.index) * CHUNK_NUMEL,), 9.0)
        for param in block.params:
            flat[param.offset : param.offset + param.numel] = params[param.name].detach().flatten()
        found += [(key, flat[key.chunk * CHUNK_NUMEL :][:CHUNK_NUMEL]) for key in layout.chunk_keys(block.index)]
    return found


def make_exporter(tmp_path: Path, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> ModelExporter:
    config = load_config(tmp_path / "model")
    return ModelExporter(tmp_path / "model", make_layout(name), config, tmp_path / "out" / "final", dtype, **options)


def export(tmp_path: Path, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    """Exports a tiny model. Returns it and the model that the library loads."""
    model = make_model_folder(tmp_path / "model", name)
    exporter = make_exporter(tmp_path, name, dtype, **options)
    for key, chunk in reversed(chunks(make_layout(name), model)):
        exporter.write_chunk(key, chunk)
    assert not (tmp_path / "out" / "final").exists()
    exporter.finish()
    exporter.abort()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["final"]
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final", output_loading_info=True)
    assert not any(info.values()), info
    return model, loaded


def assert_same(model: Any, loaded: Any, dtype: torch.dtype = torch.float32) -> None:
    assert type(loaded) is type(model)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, param in loaded.state_dict().items():
        assert param.dtype == dtype
        assert torch.equal(param, expected[name].to(dtype)), name


@pytest.mark.parametrize("name", NAMES)
def test_the_library_loads_what_was_exported(tmp_path: Path, name: str) -> None:
    model, loaded = export(tmp_path, name)
    assert_same(model, loaded)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, loaded.eval()(ids).logits)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_rounded_to_nearest_and_named_in_the_config(tmp_path: Path, name: str) -> None:
    model, loaded = export(tmp_path, name, torch.bfloat16)
    assert_same(model, loaded, torch.bfloat16)
    config = json.loads((tmp_path / "out" / "final" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("name", ["qwen2-tied", "mixtral"])
def test_large_models_are_cut_into_files(tmp_path: Path, name: str) -> None:
    model, loaded = export(tmp_path, name, max_shard_nbytes=8000)
    assert_same(model, loaded)
    folder = tmp_path / "out" / "final"
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters()) * 4
    assert all((folder / file).stat().st_size < max(8000, largest) + 4096 for file in files)


def test_a_tied_parameter_is_written_once(tmp_path: Path) -> None:
    model, loaded = export(tmp_path, "qwen2-tied")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    size = (tmp_path / "out" / "final" / "model.safetensors").stat().st_size
    assert size < 4 * sum(p.numel() for p in model.parameters()) + 8192


def test_tokenizer_and_generation_config_come_along(tmp_path: Path) -> None:
    source = tmp_path / "model"
    tokenizer = make_tokenizer(MARKED_TEMPLATE)
    tokenizer.save_pretrained(source)
    (source / "tokenizer.py").write_text("raise SystemExit\n")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("of the base model\n")
    model = make_model_folder(source, "llama")
    model.generation_config.max_new_tokens = 77
    model.generation_config.save_pretrained(source)
    _, loaded = export_saved(tmp_path, model)
    folder = tmp_path / "out" / "final"
    assert loaded.generation_config.max_new_tokens == 77
    exported = AutoTokenizer.from_pretrained(folder)
    assert exported.chat_template == {"default": MARKED_TEMPLATE, "tools": "{{ messages }}"}
    assert exported("the user asks")["input_ids"] == tokenizer("the user asks")["input_ids"]
    assert not (folder / "tokenizer.py").exists()
    assert not (folder / "README.md").exists()


def export_saved(tmp_path: Path, model: Any) -> tuple[Any, Any]:
    exporter = make_exporter(tmp_path, "llama")
    for key, chunk in chunks(make_layout("llama"), model):
        exporter.write_chunk(key, chunk)
    exporter.finish()
    return model, AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")


def test_a_generation_config_is_made_where_there_is_none(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", "llama")
    (tmp_path / "model" / "generation_config.json").unlink()
    export_saved(tmp_path, model)
    assert GenerationConfig.from_pretrained(tmp_path / "out" / "final").eos_token_id == model.config.eos_token_id


def test_finish_power_loss_afterwards_leaves_the_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model_folder(tmp_path / "model", "llama")
    make_tokenizer(MARKED_TEMPLATE).save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    cut = PowerCut(tmp_path / "out", monkeypatch)
    exporter = make_exporter(tmp_path, "llama", max_shard_nbytes=8000)
    for key, chunk in chunks(make_layout("llama"), model):
        exporter.write_chunk(key, chunk)
    exporter.finish()
    assert "final/model.safetensors.index.json" in cut.left()
    assert cut.left() == files_of(tmp_path / "out")


def test_finish_power_loss_before_the_folder_has_its_name_leaves_none_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_folder(tmp_path / "model", "llama")
    (tmp_path / "out").mkdir()
    exporter = make_exporter(tmp_path, "llama")
    for key, chunk in chunks(make_layout("llama"), model):
        exporter.write_chunk(key, chunk)
    named: list[bool] = []
    sync = os.fsync

    def note_and_sync(fd: int) -> None:
        named.append((tmp_path / "out" / "final").exists())
        sync(fd)

    monkeypatch.setattr(os, "fsync", note_and_sync)
    exporter.finish()
    assert named == [False] * (len(named) - 1) + [True]  # all files first, then the name


def test_an_incomplete_model_is_not_published(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", "llama")
    exporter = make_exporter(tmp_path, "llama")
    for key, chunk in chunks(make_layout("llama"), model)[1:]:
        exporter.write_chunk(key, chunk)
    with pytest.raises(ExportError, match="1 of 12 chunks were not written"):
        exporter.finish()
    assert not (tmp_path / "out" / "final").exists()
    exporter.abort()
    assert list((tmp_path / "out").iterdir()) == []


def test_partial_folder_of_dead_attempt_is_removed(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model", "llama")
    make_exporter(tmp_path, "llama")
    other = make_partial_folder(tmp_path / "out" / "final.2")
    exporter = make_exporter(tmp_path, "llama")
    assert len(list((tmp_path / "out").glob(".final.*.partial"))) == 2
    exporter.abort()
    assert list((tmp_path / "out").iterdir()) == [other]


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model", "llama")
    (tmp_path / "out" / "final").mkdir(parents=True)
    with pytest.raises(ExportError, match="exists already"):
        make_exporter(tmp_path, "llama")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["final"]


def test_a_disk_too_small_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model_folder(tmp_path / "model", "llama")
    monkeypatch.setattr("windlass.engine.checkpoint.model_exporter._MARGIN_NBYTES", 2**62)
    with pytest.raises(InsufficientSpaceError, match=r"for the exported model: .* needed, .* more than the .* free"):
        make_exporter(tmp_path, "llama")
    assert list((tmp_path / "out").iterdir()) == []


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:999], offset))
    model, loaded = export(tmp_path, "llama")
    assert_same(model, loaded)


def test_finish_with_folder_made_meanwhile_raises(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model", "llama")
    exporter = make_exporter(tmp_path, "llama")
    for key, chunk in chunks(make_layout("llama"), model):
        exporter.write_chunk(key, chunk)
    (tmp_path / "out" / "final").mkdir()
    (tmp_path / "out" / "final" / "config.json").write_text("another's")
    with pytest.raises(ExportError, match=r"cannot put the finished model at .*final: Directory not empty"):
        exporter.finish()
    assert (tmp_path / "out" / "final" / "config.json").read_text() == "another's"


@pytest.mark.parametrize(("code", "raised"), [(errno.ENOSPC, OSError), (errno.EIO, ExportError)])
def test_export_to_a_disk_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, raised: type[Exception]
) -> None:
    """Only a full disk is temporary, so only that error keeps its type."""

    def fail(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    make_model_folder(tmp_path / "model", "llama")
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(Exception, match=os.strerror(code)) as caught:
        make_exporter(tmp_path, "llama")
    assert type(caught.value) is raised
    assert list((tmp_path / "out").iterdir()) == []


def test_names_that_the_library_would_convert_on_loading_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model_folder(tmp_path / "model", "mixtral")
    name = "mlp.experts.down_proj"
    rule = WeightConverter(source_patterns=[name], target_patterns=[name], operations=[Transpose(1, 2)])
    monkeypatch.setattr("windlass.engine.checkpoint.name_mapping.get_model_conversion_mapping", lambda model: [rule])
    with pytest.raises(ExportError, match=r"convert 2 of its tensors on loading, among them model\.layers\.0\.mlp"):
        make_exporter(tmp_path, "mixtral")
    assert not (tmp_path / "out").exists()


def test_the_callers_config_is_not_changed(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model", "llama")
    config = load_config(tmp_path / "model")
    before = config.to_json_string()
    ModelExporter(tmp_path / "model", make_layout("llama"), config, tmp_path / "final", torch.bfloat16).abort()
    assert config.to_json_string() == before
