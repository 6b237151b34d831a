import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.support.engine.folders import make_config, make_model_folder
from windlass.engine.checkpoint import reader as weights
from windlass.engine.checkpoint.reader import CheckpointError, CheckpointReader
from windlass.engine.checkpoint.safetensors_file import StoredTensor, TensorReader, encode_header, list_tensors
from windlass.engine.model.layout import ModelLayout
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.storage.ids import Precision

CHUNK_NUMEL = 700  # cuts parameters anywhere, also in the middle of a row
NAMES = ("qwen2-tied", "qwen2", "llama", "gpt2", "mixtral")


def meta(config: Any) -> tuple[ModelLayout, Any]:
    model = build_meta_model(config, Precision.BF16)
    return Partition(model, CHUNK_NUMEL).layout, model


def open_reader(directory: Path, name: str) -> CheckpointReader:
    return CheckpointReader(directory, *meta(make_config(name)))


def read_all(reader: CheckpointReader, layout: ModelLayout) -> dict[str, torch.Tensor]:
    params = {}
    for block in layout.blocks:
        flat = torch.empty(layout.num_chunks(block.index) * CHUNK_NUMEL)
        # In reverse: the order of the calls must not matter.
        for key in reversed(layout.chunk_keys(block.index)):
            slot = torch.full((CHUNK_NUMEL,), torch.nan)
            reader.fill_chunk(key, slot)
            flat[key.chunk * CHUNK_NUMEL :][:CHUNK_NUMEL] = slot
        assert (flat[block.numel :] == 0).all()
        params |= {p.name: flat[p.offset : p.offset + p.numel].view(p.shape) for p in block.params}
    reader.close()
    return params


def assert_reads(directory: Path, name: str, model: Any) -> None:
    layout, skeleton = meta(make_config(name))
    params = read_all(CheckpointReader(directory, layout, skeleton), layout)
    expected = dict(model.named_parameters())
    assert params.keys() == expected.keys()
    for param_name, param in params.items():
        assert torch.equal(param, expected[param_name].float()), param_name


def rewrite(directory: Path, change: Any) -> None:
    """Applies `change` to the tensors of a single-file folder."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_chunks_hold_what_the_library_saved(tmp_path: Path, name: str) -> None:
    assert_reads(tmp_path, name, make_model_folder(tmp_path, name))


@pytest.mark.parametrize("name", NAMES)
def test_sharded_folders_are_read(tmp_path: Path, name: str) -> None:
    model = make_model_folder(tmp_path, name, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_reads(tmp_path, name, model)


def test_the_merged_experts_come_from_one_tensor_each(tmp_path: Path) -> None:
    # Guards the test above: the folder does use the older names that need converting.
    make_model_folder(tmp_path, "mixtral")
    assert any(".experts.0.w1.weight" in name for name in load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_widened(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model_folder(tmp_path, "qwen2").to(dtype)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == dtype
    assert_reads(tmp_path, "qwen2", model)


def test_a_chunk_reads_its_own_elements_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model_folder(tmp_path, "llama")
    layout, model = meta(make_config("llama"))
    reader = CheckpointReader(tmp_path, layout, model)
    sizes = []
    read = TensorReader.read

    def counting(self: TensorReader, tensor: StoredTensor, first: int, count: int) -> torch.Tensor:
        sizes.append(count)
        return read(self, tensor, first, count)

    monkeypatch.setattr(TensorReader, "read", counting)
    reader.fill_chunk(layout.chunk_keys(layout.blocks[1].index)[1], torch.empty(CHUNK_NUMEL))
    assert sum(sizes) == CHUNK_NUMEL


def test_the_base_models_prefix_may_be_missing_or_added(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "missing", "gpt2")
    rewrite(tmp_path / "missing", lambda t: {name.removeprefix("transformer."): v for name, v in t.items()})
    assert_reads(tmp_path / "missing", "gpt2", model)


def test_old_buffers_are_ignored(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "gpt2", "gpt2")
    buffers = {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    rewrite(tmp_path / "gpt2", lambda t: t | {"transformer.h.0.attn.bias": buffers["transformer.h.0.attn.bias"]})
    assert_reads(tmp_path / "gpt2", "gpt2", model)
    model = make_model_folder(tmp_path / "llama", "llama")
    rewrite(tmp_path / "llama", lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert_reads(tmp_path / "llama", "llama", model)


def test_a_tied_parameter_may_lie_under_either_name_or_both(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path, "qwen2-tied")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    rewrite(tmp_path, lambda t: t | {head: t[embedding].clone()})
    assert_reads(tmp_path, "qwen2-tied", model)
    rewrite(tmp_path, lambda t: {name: v for name, v in t.items() if name != embedding})
    assert_reads(tmp_path, "qwen2-tied", model)
    rewrite(tmp_path, lambda t: t | {embedding: t[head] + 1})
    with pytest.raises(CheckpointError, match="two different tensors; set tie_word_embeddings to false"):
        open_reader(tmp_path, "qwen2-tied")


def test_tied_parameters_that_differ_in_the_last_element_only_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_COMPARE_NUMEL", 100)  # they are compared piece by piece
    make_model_folder(tmp_path, "qwen2-tied")

    def change_last(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1
        return tensors | {"lm_head.weight": head}

    rewrite(tmp_path, change_last)
    with pytest.raises(CheckpointError, match="two different tensors"):
        open_reader(tmp_path, "qwen2-tied")


def test_short_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model_folder(tmp_path, "llama")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:999]], offset))
    assert_reads(tmp_path, "llama", model)


def test_file_that_is_cut_short_meanwhile_is_an_error(tmp_path: Path) -> None:
    make_model_folder(tmp_path, "llama")
    reader = open_reader(tmp_path, "llama")
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 2)
    last = max(reader._stored.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(SafetensorError, match=f"ends within tensor {last.name}: was it changed meanwhile"):
        TensorReader().read(last, 0, last.nbytes // 4)
    reader.close()


def test_reader_of_many_files_has_one_open_at_a_time(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path, "llama")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    (tmp_path / "model.safetensors").unlink()
    layout, skeleton = meta(make_config("llama"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = CheckpointReader(tmp_path, layout, skeleton)
    for block in layout.blocks:
        for key in layout.chunk_keys(block.index):
            reader.fill_chunk(key, torch.empty(CHUNK_NUMEL))
            assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("num_chars", range(8))
def test_header_ends_at_a_multiple_of_eight(num_chars: int) -> None:
    """Other programs map the file and read the numbers in place."""
    header, starts = encode_header({"x" * (num_chars + 1): (3,)}, torch.float32)
    assert len(header) % 8 == 0
    assert list(starts.values()) == [len(header)]


def drop(name: str) -> Any:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(UP), f"no tensor for the parameters: {UP}"),
        (lambda t: t | {UP: t[UP].T.contiguous()}, rf"wrong shape: {UP} \[16, 24\] instead of \[24, 16\]"),
        (lambda t: t | {UP: t[UP].to(torch.int8)}, rf"not the tensors: {UP} \(I8\)"),
        (lambda t: t | {"vision.weight": t[UP].clone()}, "no place for the tensors: vision.weight"),
        (lambda t: t | {UP[len("model.") :]: t[UP].clone()}, "more than one tensor for the same parameter"),
        (lambda t: {}, "and 16 more"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    make_model_folder(tmp_path, "llama")
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        open_reader(tmp_path, "llama")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("model.layers.0.block_sparse_moe.experts.1.w3.weight"), "cannot be made into .*gate_up_proj"),
        (
            lambda t: {n: v for n, v in t.items() if ".experts.2." not in n},
            r"gate_up_proj \[2, 48, 16\] instead of \[3",
        ),
    ],
)
def test_a_missing_expert_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    make_model_folder(tmp_path, "mixtral")
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        open_reader(tmp_path, "mixtral")


def test_folders_without_usable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights; expected model\.safetensors"):
        open_reader(tmp_path, "llama")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model\.bin\)"):
        open_reader(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        open_reader(tmp_path, "llama")


def test_a_file_is_mapped_once_to_be_checked(tmp_path: Path) -> None:
    """The process that checks a model has limited address space."""
    numel = 4 << 30
    header, starts = encode_header({"a": (numel,)}, torch.bfloat16)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(starts["a"] + 2 * numel)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 3 * numel, before[1]))
    try:
        assert list_tensors(path)["a"].nbytes == 2 * numel
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    make_model_folder(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        open_reader(tmp_path, "llama")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../secret.safetensors"}, r"no file of the folder: \.\./secret"),
        ({"a": ".."}, r"missing files: \.\."),
        ({"a": "gone.safetensors"}, r"missing files: gone\.safetensors"),
        ({"a": "there.safetensors"}, "not in their files: a"),
        ({"a": 1}, "no file of the folder: 1"),
        ([], "cannot be read"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, weight_map: Any, words: str) -> None:
    save_file({"b": torch.ones(1)}, tmp_path / "there.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=words):
        open_reader(tmp_path, "llama")
