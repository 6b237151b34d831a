"""Tests the tests: changes the product in one place at a time, and looks which test notices.

`python -m tests.support.mutants --number 200 --seed 1 --results FILE` appends a line of JSON for each mutant. Run
again, it goes on where it was stopped. What the tests of `make test` do not notice is tried with those of
`make test-long` too: a mutant that only the latter catch says what moving tests there has cost. The same seed makes the
same mutants of the same code. It works in a copy of the repository. A mutant takes about half a minute.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = ("storage", "engine", "actors", "planner", "service")
TIMEOUT_S = 400  # of one run of tests; a mutant that hangs them is caught
LONG_TIMEOUT_S = 900  # of one run of `make test-long`'s tests; they can need more, so that says nothing
# Tests of other rooms that see most of a floor work together. They run if the room's own tests notice nothing.
WIDER_TESTS = {
    "storage": ("tests/unit/storage", "tests/unit/actors/ssd"),
    "engine": ("tests/unit/actors/gpu_worker", "tests/unit/actors/parity/test_local_groups.py"),
    "actors": ("tests/unit/actors/parity/test_local_groups.py", "tests/unit/actors/parity/test_local_streams.py"),
    "planner": ("tests/unit/planner/planning", "tests/unit/planner/simulation"),
    "service": ("tests/unit/service/api/routes", "tests/unit/service/dispatcher"),
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "*"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one expression or statement. `start` and `stop`: offsets in the file's text."""

    path: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """The file's text with the change."""
        assert text[self.start : self.stop] == self.before
        return text[: self.start] + self.after + text[self.stop :]


def mutants_of(path: str, text: str) -> Iterator[Mutant]:
    """All changes that this script knows, of one file. Annotations, messages and docstrings are left alone."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()

    def offset(line: int, column: int) -> int:
        return len(raw[: starts[line - 1] + column].decode())

    def changed(node: ast.expr | ast.stmt, after: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, stop = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        return Mutant(path=path, line=node.lineno, start=start, stop=stop, before=text[start:stop], after=after)

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
                yield changed(node, f"{ast.unparse(left)} {_COMPARISONS[type(operator)]} {ast.unparse(right)}")
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                if not any(isinstance(each, ast.JoinedStr | ast.Constant | ast.List) for each in (left, right)):
                    yield changed(node, f"({ast.unparse(left)} {_OPERATORS[type(operator)]} {ast.unparse(right)})")
            case ast.BoolOp(op=operator, values=values):
                word = " or " if isinstance(operator, ast.And) else " and "
                yield changed(node, f"({word.join(f'({ast.unparse(value)})' for value in values)})")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield changed(node, f"bool({ast.unparse(operand)})")
            case ast.Return(value=ast.Constant(value=bool() as value)):
                yield changed(node, f"return {not value}")
            case ast.Expr(value=ast.Call() as call) if not ast.unparse(call).startswith(("super()", "_LOG.")):
                yield changed(node, "pass")


def chosen_mutants(number: int, seed: int) -> list[Mutant]:
    """As many mutants of each floor, the same for the same seed and code."""
    chance, chosen = random.Random(seed), list[Mutant]()
    for floor in FLOORS:
        paths = sorted(path for path in (ROOT / floor).rglob("*.py") if "migrations" not in path.parts)
        found = [each for path in paths for each in mutants_of(str(path.relative_to(ROOT)), path.read_text())]
        chosen += chance.sample(found, number // len(FLOORS))
    chance.shuffle(chosen)
    return chosen


def caught_by(copy: Path, tests: list[str], *, with_long: bool = False) -> str | None:
    """The first test that fails in the copy of the repository; None: none does."""
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    if with_long:
        environment["WINDLASS_TEST_LONG"] = "1"
        command += ["-m", "not gpu"]
    timeout_s = LONG_TIMEOUT_S if with_long else TIMEOUT_S
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None if with_long else "time-out"
    if done.returncode in (0, 5):  # 5: there is no test
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}"


def tests_of(path: str) -> list[list[str]]:
    """The tests of a file's room, and then wider ones."""
    room = Path("tests/unit") / Path(path).parent
    return [[str(room)] if (ROOT / room).is_dir() else [], list(WIDER_TESTS[path.split("/")[0]])]


def first_of(copy: Path, path: str, *, with_long: bool = False) -> str | None:
    """The first test that notices the change of a file."""
    for tests in tests_of(path):
        if tests and (test := caught_by(copy, tests, with_long=with_long)):
            return test
    return None


def main() -> None:
    """Tries each mutant that the results do not have yet, and prints the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    results: list[dict[str, object]] = []
    if options.results.exists():
        results = [json.loads(line) for line in options.results.read_text().splitlines()]
    known = {(result["path"], result["start"], result["after"]) for result in results}
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
        for mutant in chosen_mutants(options.number, options.seed):
            if (mutant.path, mutant.start, mutant.after) in known:
                continue
            text = (copy / mutant.path).read_text()
            begun_s = time.monotonic()
            (copy / mutant.path).write_text(mutant.apply(text))
            test, long_test = first_of(copy, mutant.path), None
            if test is None:
                long_test = first_of(copy, mutant.path, with_long=True)
            (copy / mutant.path).write_text(text)
            took_s = round(time.monotonic() - begun_s, 1)
            result = {**asdict(mutant), "caught_by": test, "caught_by_long": long_test, "took_s": took_s}
            results.append(result)
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            change = f"{mutant.before!r} -> {mutant.after!r}"
            print(f"{mutant.path}:{mutant.line}: {change}: {test or long_test}", flush=True)
    num_caught = sum(result["caught_by"] is not None for result in results)
    num_long = sum(result["caught_by_long"] is not None for result in results)
    print(f"{num_caught} of {len(results)} mutants were caught, {num_long} more by tests of `make test-long`")


if __name__ == "__main__":
    main()
