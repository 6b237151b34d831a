"""Demo data that every machine has: questions and answers from the docstrings of Python's standard library."""

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Folders of the standard library that are programs or tests, not public interfaces.
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "turtledemo"}
_SHORTEST, _LONGEST = 30, 160  # characters of an answer


def write_demo_files(train: Path, validation: Path, *, num_train: int, num_validation: int) -> None:
    """Writes two chat files. The same machine always gets the same files."""
    examples = sorted(_pairs())
    random.Random(0).shuffle(examples)
    if len(examples) < num_train + num_validation:
        num_train = len(examples) - num_validation
    _write(validation, examples[:num_validation])
    _write(train, examples[num_validation : num_validation + num_train])


def _write(path: Path, pairs: list[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for question, answer in pairs:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def _pairs() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.intersection(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        yield from _of_node(tree, module, module)


def _of_node(node: Any, name: str, module: str) -> Iterator[tuple[str, str]]:
    """Yields the question about a module, class or function, and those about all definitions inside it."""
    docstring = ast.get_docstring(node)
    answer = " ".join((docstring or "").split("\n\n")[0].split())
    if _SHORTEST <= len(answer) <= _LONGEST and answer.isascii():
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        question = f"What is the module {name}?" if kind == "module" else f"What does the {kind} {name} do?"
        yield question, answer
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not child.name.startswith("_"):
            yield from _of_node(child, f"{name}.{child.name}", module)
