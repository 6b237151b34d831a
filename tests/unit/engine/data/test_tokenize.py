import itertools
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from tests.support.engine.folders import MARKED_TEMPLATE, PLAIN_TEMPLATE, make_tokenizer, make_tokenizer_folder
from windlass.engine.data.examples import DataError, DataErrorCode
from windlass.engine.data.tokenize import main, prepare

CHAT = {"messages": [{"role": "user", "content": "the user asks"}, {"role": "assistant", "content": "the answers é"}]}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(tmp_path: Path, tokenizer: Any, *lines: Any, sequence_length: int = 64, **more: Any) -> dict[str, Any]:
    return prepare(
        model_dir=make_tokenizer_folder(tmp_path / "model", tokenizer, **more),
        training_file=write(tmp_path / "train.jsonl", *lines),
        validation_file=None,
        sequence_length=sequence_length,
        output_dir=tmp_path / "out",
    )


def written(tmp_path: Path) -> list[tuple[list[int], list[int]]]:
    """(input ids, targets) of each training example."""
    out = tmp_path / "out"
    tokens = np.fromfile(out / "train.tokens", np.int32)
    targets = np.fromfile(out / "train.targets", np.int32)
    offsets = np.fromfile(out / "train.offsets", np.int64)
    return [(tokens[a:b].tolist(), targets[a:b].tolist()) for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_chat_targets_are_the_assistants_tokens_shifted(tmp_path: Path, template: str) -> None:
    tokenizer = make_tokenizer(template)
    result = run(tmp_path, tokenizer, CHAT)
    ((ids, targets),) = written(tmp_path)
    text = "<|im_start|>user\nthe user asks<|im_end|>\n<|im_start|>assistant\nthe answers é<|im_end|>\n"
    assert tokenizer.decode(ids) == text.removesuffix("\n")
    learned = [t for t in targets if t != -100]
    assert tokenizer.decode(learned) == "the answers é<|im_end|>"
    # Each target is the next input, wherever there is a target.
    assert all(target in (-100, following) for target, following in zip(targets, ids[1:], strict=False))
    assert result["num_tokens"] == len(ids)
    assert result["num_targets"] == len(learned)
    assert result["warnings"] == []


@pytest.mark.parametrize("bos", [False, True])
def test_all_of_a_text_and_its_end_are_learned(tmp_path: Path, bos: bool) -> None:
    tokenizer = make_tokenizer(bos=bos)
    run(tmp_path, tokenizer, {"text": "the user asks"})
    ((ids, targets),) = written(tmp_path)
    whole = tokenizer("the user asks")["input_ids"] + [tokenizer.eos_token_id]
    assert ids == whole[:-1]
    assert targets == whole[1:]
    assert (whole[0] == 3) is bos


def test_only_the_completion_and_its_end_are_learned(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(bos=True)
    run(tmp_path, tokenizer, {"prompt": "the user asks:", "completion": " answers"})
    ((ids, targets),) = written(tmp_path)
    assert tokenizer.decode(ids) == "<|bos|>the user asks: answers"
    assert tokenizer.decode([t for t in targets if t != -100]) == " answers<|end|>"


def test_the_end_is_not_written_twice(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    run(tmp_path, tokenizer, {"prompt": "ab", "completion": "c<|end|>"})
    ((_, targets),) = written(tmp_path)
    assert tokenizer.decode([t for t in targets if t != -100]) == "c<|end|>"


def test_long_examples_are_cut_and_those_left_without_targets_dropped(tmp_path: Path) -> None:
    long_prompt = {"prompt": "z" * 40, "completion": "x"}
    long_completion, short = {"prompt": "q", "completion": "z" * 40}, {"prompt": "q", "completion": "x"}
    result = run(tmp_path, make_tokenizer(), long_completion, long_prompt, short, sequence_length=8)
    assert [len(ids) for ids, _ in written(tmp_path)] == [8, 2]
    assert result["num_examples"] == 2
    assert len(result["warnings"]) == 2
    assert "1 examples are longer than 8 tokens and were cut" in result["warnings"][0], "and not the one left out"
    assert "1 examples have nothing to learn" in result["warnings"][1]


def test_an_example_of_just_the_sequence_length_is_not_cut(tmp_path: Path) -> None:
    result = run(tmp_path, make_tokenizer(), {"text": "z" * 8}, sequence_length=8)
    ((ids, targets),) = written(tmp_path)
    assert (len(ids), targets[-1]) == (8, 2)
    assert result["warnings"] == []


def test_more_examples_than_a_tokenizer_batch_keep_their_order(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    result = run(tmp_path, tokenizer, *({"text": f"user {i}"} for i in range(200)))
    assert result["num_examples"] == 200
    assert [tokenizer.decode(ids) for ids, _ in written(tmp_path)] == [f"user {i}" for i in range(200)]


def straddling_tokenizer(template: str | None = PLAIN_TEMPLATE) -> Any:
    """A tokenizer with a token "xy" for these two adjacent characters."""
    tokenizer = make_tokenizer(template)
    tokenizer.backend_tokenizer.add_tokens(["xy"])
    assert tokenizer.convert_ids_to_tokens(tokenizer("axyb")["input_ids"]) == ["a", "xy", "b"]
    return tokenizer


SHORT_TEMPLATE = (
    "{% for m in messages %}{{ 'y' if loop.index0 == 2 }}{{ m.role }}-{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}assistant-{% endif %}"
)

TERSE_TEMPLATE = (
    "{% for m in messages %}{{ 'u' if m.role == 'user' else 'x' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}x{% endif %}"
)


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": role, "content": c} for role, c in zip(roles, contents, strict=False)]}


@pytest.mark.parametrize(
    ("template", "line", "learned"),
    [
        (None, {"prompt": "ax", "completion": "yb"}, "xyb<|end|>"),
        (None, {"prompt": "axy", "completion": "b"}, "b<|end|>"),
        (None, {"prompt": "a", "completion": "xyb"}, "xyb<|end|>"),
        (None, {"prompt": "the user asks: ", "completion": "answers"}, " answers<|end|>"),
        (SHORT_TEMPLATE.replace("-{", "x{"), chat("a", "yb"), "xyb"),
        (SHORT_TEMPLATE, chat("a", "bx", "c"), "bxy"),
        (SHORT_TEMPLATE, chat("xy", "b", "xyc"), "b"),
    ],
)
def test_a_token_that_straddles_an_end_of_the_answer_is_learned(
    tmp_path: Path, template: str | None, line: dict[str, Any], learned: str
) -> None:
    tokenizer = straddling_tokenizer(template)
    run(tmp_path, tokenizer, line, vocabulary=500)
    ((_, targets),) = written(tmp_path)
    assert tokenizer.decode([t for t in targets if t != -100]) == learned


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (None, {"prompt": "aaaax", "completion": "yb"}),
        (TERSE_TEMPLATE, chat("aaa", "yb")),
    ],
)
def test_a_straddling_token_is_learned_where_the_example_is_cut_after_it(
    tmp_path: Path, template: str | None, line: dict[str, Any]
) -> None:
    tokenizer = straddling_tokenizer(template)
    place = 4  # of "xy" among the tokens; its prediction is the last one that remains
    run(tmp_path, tokenizer, line, vocabulary=500, sequence_length=place)
    ((ids, targets),) = written(tmp_path)
    assert len(ids) == place
    assert tokenizer.convert_ids_to_tokens([t for t in targets if t != -100]) == ["xy"]
    assert targets[-1] != -100
    with pytest.raises(DataError, match="none of its 1 examples"):
        run(tmp_path, tokenizer, line, vocabulary=500, sequence_length=place - 1)


def test_spaces_that_a_tokenizer_leaves_out_of_its_ranges_are_learned(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encoded = tokenizer("ab  ", return_offsets_mapping=True)
    assert encoded["offset_mapping"][-1] == (4, 4)
    run(tmp_path, tokenizer, {"prompt": "a ", "completion": "  b  "})
    ((_, targets),) = written(tmp_path)
    learned = tokenizer.decode([t for t in targets if t != -100])
    assert learned.endswith("  b  <|end|>")


def test_a_chat_rendered_anew_for_each_answer_becomes_examples_and_its_cost_is_told(tmp_path: Path) -> None:
    template = "{{ messages | length }}" + PLAIN_TEMPLATE
    tokenizer = make_tokenizer(template)
    result = run(
        tmp_path, tokenizer, chat("a", "b", "c", "d"), chat("a", "b"), chat("a", "b", "c", "d"), sequence_length=64
    )
    parts = [tokenizer.decode([t for t in targets if t != -100]) for _, targets in written(tmp_path)]
    assert parts == ["b<|im_end|>", "d<|im_end|>", "b<|im_end|>", "b<|im_end|>", "d<|im_end|>"]
    lengths = [len(ids) + 1 for ids, _ in written(tmp_path)]
    assert result["num_examples"] == 5
    (warning,) = result["warnings"]
    total, longest = sum(lengths) - lengths[2], lengths[1] + lengths[4]
    assert f"train.jsonl: 2 chats became 4 examples with {total} tokens in all, {total / longest:.1f} times" in warning


def test_later_answers_that_no_longer_fit_are_left_out_one_by_one(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("{{ messages | length }}" + PLAIN_TEMPLATE)
    result = run(tmp_path, tokenizer, chat("a", "b", "c", "d"), sequence_length=24)
    assert result["num_examples"] == 1
    assert "1 examples have nothing to learn within the first 24 tokens" in result["warnings"][0]


def test_a_chat_of_many_examples_goes_to_the_tokenizer_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.engine.data.tokenize.BATCH_NUM_EXAMPLES", 3)
    tokenizer = make_tokenizer("{{ messages | length }}" + PLAIN_TEMPLATE)
    line = {"messages": chat("a", "b")["messages"] * 8}
    result = run(tmp_path, tokenizer, line, CHAT, sequence_length=256)
    assert result["num_examples"] == 9
    assert "1 chats became 8 examples" in result["warnings"][0]


def test_notes_on_chats_are_told_with_their_first_line(tmp_path: Path) -> None:
    named = {"messages": [{"role": "user", "content": "a", "name": "Ann"}, CHAT["messages"][1]]}
    tokenizer = make_tokenizer(PLAIN_TEMPLATE.replace("assistant\n{%", "assistant\n<think>{%"))
    result = run(tmp_path, tokenizer, CHAT, named, named)
    thinks, name = result["warnings"]
    assert thinks.startswith("train.jsonl: line 1 and 2 examples more: the chat template's generation prompt ends with")
    assert name.startswith('train.jsonl: line 2: the chat template does not read the field "name"')


def test_a_bad_chat_is_named_with_line_field_and_reason(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    with pytest.raises(DataError) as caught:
        run(tmp_path, make_tokenizer(), CHAT, calls)
    place = "train.jsonl, line 2, field messages[1].tool_calls: the chat template drops it"
    assert caught.value.message.startswith(place)


@pytest.mark.parametrize(("day", "year"), [(date(2025, 1, 2), "2025"), (None, str(date.today().year))])
def test_the_day_that_a_template_prints_is_given_once(tmp_path: Path, day: date | None, year: str) -> None:
    tokenizer = make_tokenizer("{{ strftime_now('%Y') }}" + PLAIN_TEMPLATE)
    run(tmp_path, tokenizer, CHAT)
    paths = {"training_file": tmp_path / "train.jsonl", "output_dir": tmp_path / "out"}
    prepare(model_dir=tmp_path / "model", validation_file=None, sequence_length=64, day=day, **paths)
    ((ids, _),) = written(tmp_path)
    assert tokenizer.decode(ids).startswith(year)


@pytest.mark.parametrize(
    ("options", "lines", "code", "param", "words"),
    [
        ({"template": None}, [CHAT], "no_chat_template", "training_file", "train.jsonl, line 1, field messages: "),
        ({"template": "{{ raise_exception('no') }}"}, [CHAT], "chat_template_failed", "training_file", "line 1"),
        ({"eos": False}, [{"text": "a"}], "invalid_tokenizer", "model", "eos_token"),
        ({}, [{"text": ""}], "no_usable_example", "training_file", "none of its 1 examples"),
        ({}, [CHAT, {"text": "a"}], "mixed_formats", "training_file", "line 2"),
    ],
)
def test_unusable_data_is_refused(
    tmp_path: Path, options: dict[str, Any], lines: list[Any], code: str, param: str, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        run(tmp_path, make_tokenizer(**options), *lines)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert words in caught.value.message
    assert not (tmp_path / "out" / "meta.json").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocabulary has 50 ids") as caught:
        run(tmp_path, make_tokenizer(), {"text": "a"}, vocabulary=50)
    assert (caught.value.code, caught.value.param) == (DataErrorCode.INVALID_TOKENIZER, "model")


def test_a_folder_without_or_with_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    make_tokenizer_folder(tmp_path / "model", make_tokenizer())
    arguments = {
        "training_file": write(tmp_path / "train.jsonl", CHAT),
        "validation_file": None,
        "sequence_length": 8,
        "output_dir": tmp_path / "out",
    }
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        prepare(model_dir=tmp_path / "model", **arguments)
    assert caught.value.param == "model"
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="has no tokenizer"):
        prepare(model_dir=tmp_path / "none", **arguments)


def test_progress_is_printed_and_told_over_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("windlass.engine.data.tokenize.PROGRESS_INTERVAL_S", 0.0)
    make_tokenizer_folder(tmp_path / "model", make_tokenizer())
    told = tmp_path / "progress.json"
    prepare(
        model_dir=tmp_path / "model",
        training_file=write(tmp_path / "train.jsonl", *({"text": "user"} for _ in range(96))),
        training_name="mine.jsonl",
        validation_file=write(tmp_path / "valid.jsonl", *({"text": "user"} for _ in range(32))),
        sequence_length=8,
        output_dir=tmp_path / "out",
        progress_path=told,
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[63] == "training_file: 0 examples, line 64, 50 percent"
    assert lines[96] == "training_file: 96 examples, done"
    assert lines[97] == "validation_file: 0 examples, line 1, 75 percent"
    assert json.loads(told.read_text()) == {"percent": 100, "line": 32, "file": "valid.jsonl"}


def test_the_process_writes_its_result(tmp_path: Path) -> None:
    make_tokenizer_folder(tmp_path / "model", make_tokenizer())
    write(tmp_path / "train.jsonl", CHAT, CHAT)
    write(tmp_path / "valid.jsonl", {"text": "the user"})
    command = [
        sys.executable,
        "-m",
        "windlass.engine.data.tokenize",
        "--model-dir",
        "model",
        "--training-file",
        "train.jsonl",
    ]
    command += [
        "--validation-file",
        "valid.jsonl",
        "--sequence-length",
        "64",
        "--output-dir",
        "out",
        "--result",
        "r.json",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads((tmp_path / "r.json").read_text())
    assert result.pop("num_tokens") > result.pop("num_targets") > 0
    assert result == {"ok": True, "num_examples": 2, "num_validation_examples": 1, "warnings": []}
    assert "training_file: 2 examples, done" in done.stdout


def test_a_bad_validation_file_is_named_in_the_result(tmp_path: Path) -> None:
    make_tokenizer_folder(tmp_path / "model", make_tokenizer())
    write(tmp_path / "train.jsonl", CHAT)
    (tmp_path / "valid.jsonl").write_text('{"text": 1}')
    paths = {"--model-dir": "model", "--training-file": "train.jsonl", "--validation-file": "valid.jsonl"}
    paths |= {"--output-dir": "out", "--result": "r.json"}
    arguments = [word for option, name in paths.items() for word in (option, str(tmp_path / name))]
    arguments += ["--validation-name=-b.jsonl (file-2)"]
    assert main([*arguments, "--sequence-length", "64"]) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == {
        "ok": False,
        "error": {
            "code": "invalid_field",
            "message": "-b.jsonl (file-2), line 1, field text: expected a string, not a number",
            "param": "validation_file",
        },
    }
