"""A digest of the code that decides what is recorded of the known families."""

import ast
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import windlass.engine.fingerprint

_ENGINE = Path(windlass.engine.fingerprint.__file__).parent
# What a dry run executes, and its counts.
_ENGINE_FILES = (
    "activations",
    "linear_parts",
    "memory_estimate/dry_run.py",
    "memory_estimate/live_storages.py",
    "memory_estimate/model_facts.py",
    "memory_estimate/traced_facts.py",
    "memory_plan/activation_policy.py",
    "model/block_runner.py",
    "model/epilogue_calls.py",
    "model/fake_mode.py",
    "model/fused_kernels.py",
    "model/grad_buffer.py",
    "model/head.py",
    "model/head_slices.py",
    "model/installed_params.py",
    "model/layout.py",
    "model/model_forward.py",
    "model/partition.py",
    "slices",
)
# What makes the sample models, lists the choices, and finds the formulas.
_PLANNER_FILES = (
    "cost/activation_options.py",
    "profiling/model_profiler.py",
    "profiling/known/formulas.py",
    "profiling/known/record.py",
    "profiling/known/recorded_sizes.py",
)


@functools.cache
def code_digest() -> str:
    """Returns a digest that changes with the code, but not with its comments, docstrings and layout."""
    planner = Path(__file__).parents[2]
    paths = [*(_ENGINE / name for name in _ENGINE_FILES), *(planner / name for name in _PLANNER_FILES)]
    digest = hashlib.sha256()
    for path in paths:
        for module in sorted(path.rglob("*.py")) if path.is_dir() else (path,):
            tree = ast.parse(module.read_text(encoding="utf-8"))
            digest.update(json.dumps([module.name, _plain(tree)]).encode())
    return digest.hexdigest()


def _plain(node: Any) -> Any:
    """Returns a syntax tree as JSON values. Empty fields are left out, because later Pythons add some."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return [type(node).__name__, *([name, _plain(value)] for name, value in fields)]
    if isinstance(node, list):
        return list(map(_plain, _without_docstrings(node)))
    return repr(node)


def _without_docstrings(nodes: list[Any]) -> Iterator[Any]:
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                continue
        yield node
