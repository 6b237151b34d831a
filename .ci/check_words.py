"""Checks the rules of plain language that a program can check: `python .ci/check_words.py [FILE or FOLDER ...]`.

Docstrings of Python files are read. Part of `make check`; docs/architecture.md, "Plain words", has the reasons.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# A first line is a sentence with a verb, or a noun phrase: these begin neither.
_FIRST_WORDS = frozenset({"What", "Who", "Whom", "Whose", "Of", "Where", "How", "Whether", "When", "Which", "Why"})
# The actor has a name: the scheduler, the SSD server, the caller.
_NAMELESS = re.compile(
    r"\b(somebody|someone|nobody|everybody|everyone|people|strangers|who waits|what is owed)\b", re.IGNORECASE
)
_MAX_WORDS = 25  # of a sentence
_SENTENCE_END = re.compile(r"(?<=[.:;?!])\s+|\n\s*\n|\n(?=\s*[-*|])")
_CODE = re.compile(r"`[^`]*`|^ {4,}.*$", re.MULTILINE)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line number and the text of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def faults(text: str) -> Iterator[str]:
    """The rules that a docstring breaks, each in a few words."""
    first = re.split(r"[^\w']", text, maxsplit=1)[0]
    if first in _FIRST_WORDS:
        yield f'begins with "{first}": begin with a verb or a noun'
    prose = _CODE.sub("code", text)
    for match in _NAMELESS.finditer(prose):
        yield f'"{match[0]}": name the actor (the scheduler, the caller, the user)'
    for sentence in _SENTENCE_END.split(prose):
        if len(words := sentence.split()) > _MAX_WORDS:
            yield f'a sentence of {len(words)} words, at most {_MAX_WORDS}: "{" ".join(words[:6])} ..."'


def main(arguments: list[str]) -> int:
    """Print each fault with its file and line; 1 if there is one."""
    listed = subprocess.run(["git", "ls-files", *(arguments or ["*.py"])], capture_output=True, text=True, check=True)
    num_faults = 0
    for name in listed.stdout.splitlines():
        path = Path(name)
        if path.suffix != ".py" or path.is_symlink() or not path.exists():
            continue
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            for fault in faults(text):
                print(f"{path}:{line}: {fault}")
                num_faults += 1
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
