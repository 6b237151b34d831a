"""Turns training files into token files: `python -m windlass.engine.data.tokenize`, a process of its own.

It runs in a separate process, because it executes the model's chat template and reads files that users uploaded. It
streams, so its memory does not grow with the files. `windlass.engine.data.dataset` maps the results into memory.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from windlass.amounts import bytes_text
from windlass.engine.data.chat import ChatRenderer, ChatTemplateError, RenderedText
from windlass.engine.data.example_bounds import (
    ALWAYS_ALLOWED_NBYTES,
    MAX_GROWTH,
    MAX_NUM_CHARS,
    MAX_RENDER_CPU_S,
    RenderTimeError,
    memory_limit,
    within_cpu_time,
)
from windlass.engine.data.examples import (
    FORMAT_VERSION,
    NO_TARGET,
    ChatExample,
    DataError,
    DataErrorCode,
    DataFile,
    Example,
    TextExample,
)
from windlass.storage.files import sync_tree, write_atomically

# Limits of a batch for the tokenizer; it ends at the first one that it reaches.
BATCH_NUM_EXAMPLES = 64
BATCH_NUM_CHARS = 4 * 2**20
PROGRESS_INTERVAL_S = 1.0  # seconds between two progress reports
_MAX_NUM_NOTES = 10  # distinct notes of a file that become warnings

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class Progress:
    """Reports the progress of reading the files, on standard output and in a progress file.

    The progress file is a JSON object: `percent` of all files' bytes, and the current `line` of `file` (its name in
    messages). It is replaced atomically, once a second.
    """

    path: Path | None  # None: no progress file is written
    total_nbytes: int  # of all files
    _read_before_nbytes: int = 0  # of the files before this one
    _next_s: float = 0.0

    def tell(self, file: DataFile, line: int, nbytes_read: int, *, num_examples: int) -> None:
        """Reports the current line, unless the last report is less than a second old."""
        if (now := time.monotonic()) < self._next_s:
            return
        self._next_s = now + PROGRESS_INTERVAL_S
        percent = 100 * (self._read_before_nbytes + nbytes_read) // max(1, self.total_nbytes)
        if self.path is not None:
            _write_json(self.path, {"percent": percent, "line": line, "file": file.told_name})
        print(f"{file.param}: {num_examples} examples, line {line}, {percent} percent", flush=True)

    def end_file(self, file: DataFile) -> None:
        """Records that a whole file was read."""
        self._read_before_nbytes += file.nbytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSplit:
    """The counts of one prepared file."""

    num_examples: int
    num_tokens: int  # input positions
    num_targets: int
    num_cut: int  # of num_examples: longer than the sequence length
    num_dropped: int  # examples left without a target
    warnings: tuple[str, ...]  # further warnings about the file


def load_tokenizer(model_dir: Path) -> Any:
    """Loads the tokenizer of a model folder without running code from it. Raises `DataError` with param "model"."""
    if not (model_dir / "tokenizer_config.json").exists() and not (model_dir / "tokenizer.json").exists():
        raise DataError(
            DataErrorCode.INVALID_TOKENIZER,
            f"model folder {model_dir.name} has no tokenizer: neither tokenizer.json nor tokenizer_config.json",
            "model",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    # The tokenizers library raises bare Exceptions for files it cannot parse.
    except Exception as error:
        raise DataError(
            DataErrorCode.INVALID_TOKENIZER,
            f"model folder {model_dir.name}: the tokenizer cannot be loaded: {error}",
            "model",
        ) from error
    if not tokenizer.is_fast:
        raise DataError(
            DataErrorCode.INVALID_TOKENIZER,
            f"model folder {model_dir.name}: {type(tokenizer).__name__} cannot tell a token's place in the text; "
            "a folder with tokenizer.json is needed",
            "model",
        )
    return tokenizer


def vocabulary_size(model_dir: Path) -> int | None:
    """Returns the number of token ids in the model's config, None if the config does not state it."""
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            DataErrorCode.INVALID_TOKENIZER,
            f"model folder {model_dir.name}: config.json cannot be read: {error}",
            "model",
        ) from error
    text_config = config.get("text_config")
    size = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    return size if isinstance(size, int) else None


class ExampleEncoder:
    """Tokenizes the examples of one file, and marks the tokens to learn.

    `day` is the date that chat templates print.
    """

    def __init__(self, tokenizer: Any, file: DataFile, vocabulary_size: int | None, day: date | None = None) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, day)
        self._file = file
        self._vocabulary_size = vocabulary_size

    def render(self, line: int, example: Example) -> Iterator[RenderedText]:
        """Yields the line's examples as texts with the characters to learn. Raises `DataError` that names the line."""
        for item in self._render(line, example):
            if len(item.text) > MAX_NUM_CHARS:
                raise self._file.error(
                    DataErrorCode.EXAMPLE_TOO_LARGE,
                    f"its text has {len(item.text):,} characters, of at most {MAX_NUM_CHARS:,}; split it into several "
                    "lines",
                    line=line,
                )
            yield item

    def _render(self, line: int, example: Example) -> Iterator[RenderedText]:
        if isinstance(example, ChatExample):
            yield from self._render_chat(line, example)
            return
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                DataErrorCode.INVALID_TOKENIZER,
                "the tokenizer has no end-of-text token (eos_token), so the model could not learn where a text ends",
                "model",
            )
        if isinstance(example, TextExample):
            yield RenderedText(text=example.text, targets=((0, len(example.text)),))
            return
        text = example.prompt + example.completion
        yield RenderedText(text=text, targets=((len(example.prompt), len(text)),))

    def _render_chat(self, line: int, example: ChatExample) -> Iterator[RenderedText]:
        if not self._renderer.has_template:
            raise self._file.error(
                DataErrorCode.NO_CHAT_TEMPLATE,
                "the model's tokenizer has no chat template, so conversations cannot be rendered; use a chat model, or "
                '"text" or "prompt" and "completion" lines',
                line=line,
                field="messages",
            )
        try:
            yield from within_cpu_time(self._renderer.render(example), MAX_RENDER_CPU_S)
        except ChatTemplateError as error:
            raise self._file.error(
                DataErrorCode.CHAT_TEMPLATE_FAILED, error.message, line=line, field=error.field
            ) from error
        except RenderTimeError:
            num_learned = sum(example.weights)
            raise self._file.error(
                DataErrorCode.EXAMPLE_TOO_LARGE,
                f"the chat template took more than {MAX_RENDER_CPU_S:g} s to render this conversation of "
                f"{len(example.messages)} messages, {num_learned} of them to learn; split it into several lines, or "
                "use a model with a simpler chat template",
                line=line,
                field="messages",
            ) from None

    def encode(
        self, rendered: Sequence[RenderedText], form: type[Example]
    ) -> Iterator[tuple[Tokens, npt.NDArray[np.bool_]]]:
        """Yields token ids, and a mask of those to learn, for each text. All texts are from examples of type `form`.

        A chat template writes all special tokens itself. For the other types the tokenizer adds its special tokens, and
        the end-of-text token is appended and learned.
        """
        is_chat = form is ChatExample
        encoding = self._tokenizer(
            [item.text for item in rendered],
            add_special_tokens=not is_chat,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for item, ids, offsets in zip(rendered, encoding["input_ids"], encoding["offset_mapping"], strict=True):
            tokens = np.array(ids, dtype=np.int32)
            spans = _whole_spans(np.array(offsets, dtype=np.int64).reshape(-1, 2))
            # All tokens of a plain text are learned, also those without characters.
            learn = np.full(len(tokens), form is TextExample, dtype=np.bool_)
            # A token across a boundary is learned, because a part's first word often shares a token with the space
            # before it.
            for start, stop in item.targets:
                learn |= (spans[:, 0] < stop) & (spans[:, 1] > start)
            if not is_chat:
                tokens, learn = self._end(tokens, learn)
            self._check_vocabulary(tokens)
            yield tokens, learn

    def _end(self, tokens: Tokens, learn: npt.NDArray[np.bool_]) -> tuple[Tokens, npt.NDArray[np.bool_]]:
        eos = self._tokenizer.eos_token_id
        if len(tokens) and tokens[-1] == eos:  # added by the tokenizer, or spelled in the text
            learn[-1] = True
            return tokens, learn
        return np.append(tokens, np.int32(eos)), np.append(learn, True)

    def _check_vocabulary(self, tokens: Tokens) -> None:
        size = self._vocabulary_size
        if size is not None and len(tokens) and (largest := int(tokens.max())) >= size:
            raise DataError(
                DataErrorCode.INVALID_TOKENIZER,
                f"the tokenizer gives token id {largest} ({self._tokenizer.convert_ids_to_tokens(largest)!r}), but the "
                f"model's vocabulary has {size} ids (config.json: vocab_size): the two do not belong together",
                "model",
            )


def _whole_spans(spans: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Extends tokens' character ranges, (num_tokens, 2), by the spaces that some tokenizers omit from them.

    Such a tokenizer gives a token of spaces an empty range after the spaces, which would be in no part to learn.
    """
    starts, stops = spans[:, 0], spans[:, 1]
    ends_before = np.concatenate((np.zeros(1, dtype=np.int64), np.maximum.accumulate(stops)))[:-1]
    return np.stack((np.minimum(starts, ends_before), stops), axis=1)


@dataclass(slots=True)
class SplitWriter:
    """Appends examples to a split's three files: `{name}.tokens`, `{name}.targets` (int32), `{name}.offsets` (int64).

    targets[t] is the token to predict after position t, or -100. There is one more offset than examples.
    """

    directory: Path
    name: str
    sequence_length: int
    num_examples: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_cut: int = 0
    num_dropped: int = 0
    _files: dict[str, IO[bytes]] = field(default_factory=dict)

    def __enter__(self) -> "SplitWriter":
        for kind in ("tokens", "targets", "offsets"):
            self._files[kind] = (self.directory / f"{self.name}.{kind}").open("wb")
        self._files["offsets"].write(np.int64(0).tobytes())
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, tokens: Tokens, learn: npt.NDArray[np.bool_]) -> None:
        """Adds an example. Its last token is only a target, because no token follows it."""
        inputs = tokens[:-1]
        targets = np.where(learn[1:], tokens[1:], np.int32(NO_TARGET)).astype(np.int32)
        is_cut = len(inputs) > self.sequence_length
        inputs, targets = inputs[: self.sequence_length], targets[: self.sequence_length]
        num_targets = int((targets != NO_TARGET).sum())
        if num_targets == 0:
            self.num_dropped += 1
            return
        self.num_examples += 1
        self.num_cut += is_cut
        self.num_tokens += len(inputs)
        self.num_targets += num_targets
        self._files["tokens"].write(inputs.tobytes())
        self._files["targets"].write(targets.tobytes())
        self._files["offsets"].write(np.int64(self.num_tokens).tobytes())

    @property
    def nbytes(self) -> int:
        """The bytes of tokens and targets written so far."""
        return self.num_tokens * 2 * np.dtype(np.int32).itemsize

    def summary(self, warnings: Iterable[str] = ()) -> PreparedSplit:
        """Returns the counts of the written examples."""
        return PreparedSplit(
            num_examples=self.num_examples,
            num_tokens=self.num_tokens,
            num_targets=self.num_targets,
            num_cut=self.num_cut,
            num_dropped=self.num_dropped,
            warnings=tuple(warnings),
        )


@dataclass(slots=True)
class ChatRecord:
    """Counts the chats that were split into several examples, and collects the renderer's notes."""

    num_split: int = 0  # chats with several examples
    num_examples: int = 0  # examples of those chats
    num_tokens: int = 0  # tokens of those examples, uncut
    num_tokens_at_least: int = 0  # tokens of the longest example of each of those chats
    _line: int = 0
    _lengths: list[int] = field(default_factory=list)  # tokens of each example of the line
    _notes: dict[str, tuple[int, int]] = field(default_factory=dict)  # note: (first line, number of examples)

    def add(self, line: int, item: RenderedText, num_tokens: int) -> None:
        """Counts an example. All examples of a line must be added consecutively."""
        if line != self._line:
            self._end_line()
            self._line = line
        self._lengths.append(num_tokens)
        for note in item.notes:
            first, count = self._notes.get(note, (line, 0))
            if note in self._notes or len(self._notes) < _MAX_NUM_NOTES:
                self._notes[note] = (first, count + 1)

    def _end_line(self) -> None:
        if len(self._lengths) > 1:
            self.num_split += 1
            self.num_examples += len(self._lengths)
            self.num_tokens += sum(self._lengths)
            self.num_tokens_at_least += max(self._lengths)
        self._lengths = []

    def warnings(self) -> list[str]:
        """Returns the warnings about a file. Call it after its last line."""
        self._end_line()
        warnings = [
            f"line {line}{f' and {count - 1} examples more' if count > 1 else ''}: {note}"
            for note, (line, count) in self._notes.items()
        ]
        if self.num_split:
            ratio = self.num_tokens / self.num_tokens_at_least
            warnings.append(
                f"{self.num_split} chats became {self.num_examples} examples with {self.num_tokens} tokens in all, "
                f"{ratio:.1f} times the tokens of the chats, because the chat template renders an assistant message "
                "differently when more follows"
            )
        return warnings


def _batches(
    file: DataFile, encoder: ExampleEncoder, tell: Callable[[int, int], None]
) -> Iterator[tuple[list[int], list[RenderedText], type[Example]]]:
    """Yields batches for the tokenizer: (lines, rendered examples, their type).

    `tell` is called before each line is rendered, with the line's number and the bytes read so far.
    """
    lines: list[int] = []
    rendered: list[RenderedText] = []
    num_chars = 0
    form: type[Example] = TextExample
    for line, nbytes_read, example in file.examples():
        tell(line, nbytes_read)
        form = type(example)
        for item in encoder.render(line, example):
            lines.append(line)
            rendered.append(item)
            num_chars += len(item.text)
            if len(rendered) >= BATCH_NUM_EXAMPLES or num_chars >= BATCH_NUM_CHARS:
                yield lines, rendered, form
                lines, rendered, num_chars = [], [], 0
    if rendered:
        yield lines, rendered, form


def prepare_split(
    file: DataFile,
    tokenizer: Any,
    *,
    vocabulary_size: int | None,
    sequence_length: int,
    output_dir: Path,
    split: str,
    day: date | None = None,
    progress: Progress | None = None,
) -> PreparedSplit:
    """Tokenizes one file into `output_dir`. Raises `DataError` if the data cannot be used for training."""
    encoder = ExampleEncoder(tokenizer, file, vocabulary_size, day)
    record = ChatRecord()
    progress = progress or Progress(None, file.nbytes())
    last_line = 0
    most_nbytes = max(ALWAYS_ALLOWED_NBYTES, MAX_GROWTH * file.nbytes())
    with SplitWriter(output_dir, split, sequence_length) as writer:

        def tell(line: int, nbytes_read: int) -> None:
            nonlocal last_line
            last_line = line
            progress.tell(file, line, nbytes_read, num_examples=writer.num_examples)

        try:
            for lines, rendered, form in _batches(file, encoder, tell):
                encoded = encoder.encode(rendered, form)
                for line, item, (tokens, learn) in zip(lines, rendered, encoded, strict=True):
                    record.add(line, item, len(tokens))
                    writer.append(tokens, learn)
                if writer.nbytes > most_nbytes:
                    raise file.error(
                        DataErrorCode.EXAMPLE_TOO_LARGE,
                        f"the lines up to this one became {bytes_text(writer.nbytes)} of tokens, of at most "
                        f"{bytes_text(most_nbytes)} for this file: the chat template renders conversations anew for "
                        "each answer; split long ones, or use a model with another chat template",
                        line=lines[-1],
                    )
        except MemoryError:
            raise file.error(
                DataErrorCode.EXAMPLE_TOO_LARGE,
                f"this line, or one of the next, takes more memory than a preparation gets{memory_limit()}; split "
                "it, or use a model with a simpler chat template",
                line=max(1, last_line),
            ) from None
        summary = writer.summary(record.warnings())
    progress.end_file(file)
    if summary.num_examples == 0:
        raise file.error(
            DataErrorCode.NO_USABLE_EXAMPLE,
            f"none of its {summary.num_dropped} examples has a token to learn within its first {sequence_length}; "
            "raise the sequence length, or give assistant messages weight 1",
        )
    print(f"{file.param}: {summary.num_examples} examples, done", flush=True)
    return summary


def _warnings(file: DataFile, split: PreparedSplit, sequence_length: int) -> list[str]:
    warnings = []
    if split.num_cut:
        warnings.append(
            f"{file.told_name}: {split.num_cut} examples are longer than {sequence_length} tokens and were cut"
        )
    if split.num_dropped:
        warnings.append(
            f"{file.told_name}: {split.num_dropped} examples have nothing to learn within the first {sequence_length} "
            "tokens and were left out"
        )
    return warnings + [f"{file.told_name}: {warning}" for warning in split.warnings]


def prepare(
    *,
    model_dir: Path,
    training_file: Path,
    validation_file: Path | None,
    sequence_length: int,
    output_dir: Path,
    day: date | None = None,
    training_name: str | None = None,
    validation_name: str | None = None,
    progress_path: Path | None = None,
) -> dict[str, Any]:
    """Writes the dataset folder and returns the content of the result file. Raises `DataError`.

    The same arguments give the same folder. `meta.json` is written last: a folder without it is not a dataset.

    Args:
        model_dir: the folder of the model with its tokenizer.
        training_file: the JSONL file to train on.
        validation_file: the JSONL file to evaluate on.
        sequence_length: tokens at which longer examples are cut.
        output_dir: the dataset folder.
        day: the date that chat templates print; default: today.
        training_name: the training file's name in messages; default: the last part of its path.
        validation_name: the validation file's name in messages.
        progress_path: the progress file (see `Progress`).
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    output_dir.mkdir(parents=True, exist_ok=True)
    meta_path = output_dir / "meta.json"
    meta_path.unlink(missing_ok=True)
    files = {"train": DataFile(path=training_file, param="training_file", name=training_name)}
    if validation_file is not None:
        files["validation"] = DataFile(path=validation_file, param="validation_file", name=validation_name)
    tokenizer = load_tokenizer(model_dir)
    size = vocabulary_size(model_dir)
    splits: dict[str, PreparedSplit] = {}
    warnings: list[str] = []
    progress = Progress(progress_path, sum(file.nbytes() for file in files.values()))
    for name, file in files.items():
        splits[name] = prepare_split(
            file,
            tokenizer,
            vocabulary_size=size,
            sequence_length=sequence_length,
            output_dir=output_dir,
            split=name,
            day=day,
            progress=progress,
        )
        warnings += _warnings(file, splits[name], sequence_length)
    meta = {
        "version": FORMAT_VERSION,
        "sequence_length": sequence_length,
        "splits": {
            name: {"num_examples": s.num_examples, "num_tokens": s.num_tokens, "num_targets": s.num_targets}
            for name, s in splits.items()
        },
    }
    sync_tree(output_dir)  # before meta.json: after a power loss, files of the right length could hold other tokens
    _write_json(meta_path, meta)
    return {
        "ok": True,
        "num_examples": splits["train"].num_examples,
        "num_validation_examples": splits["validation"].num_examples if "validation" in splits else 0,
        "num_tokens": splits["train"].num_tokens,
        "num_targets": splits["train"].num_targets,
        "warnings": warnings,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the preparation and writes its result or its error to the result file. Returns exit status 0 for both."""
    parser = argparse.ArgumentParser(prog="windlass.engine.data.tokenize", description="Tokenizes training files.")
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--training-file", type=Path, required=True)
    parser.add_argument("--validation-file", type=Path)
    parser.add_argument("--training-name", help="what messages call the training file")
    parser.add_argument("--validation-name", help="the same for the validation file")
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--progress", type=Path, help="where to tell how far it is")
    parser.add_argument(
        "--day", type=date.fromisoformat, help="the date chat templates print, YYYY-MM-DD; default: today"
    )
    options = parser.parse_args(arguments)
    try:
        result = prepare(
            model_dir=options.model_dir,
            training_file=options.training_file,
            validation_file=options.validation_file,
            sequence_length=options.sequence_length,
            output_dir=options.output_dir,
            day=options.day,
            training_name=options.training_name,
            validation_name=options.validation_name,
            progress_path=options.progress,
        )
    except DataError as error:
        result = {"ok": False, "error": {"code": error.code, "message": error.message, "param": error.param}}
    _write_json(options.result, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
