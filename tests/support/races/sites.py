"""The places of the product that order a device's work: waits, recorded events, callbacks, and memory that these hold.

They are found in the code, so that a test fails until a new one has its place in a table.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.support.races.checker import ROOT

# Rooms whose code queues work on a device.
ROOMS = (
    *("engine/device", "engine/activations", "engine/model", "engine/optimizer", "engine/pieces"),
    *("actors/gpu_worker", "actors/activations", "actors/offload"),
)
_METHODS = frozenset(
    {"wait", "wait_event", "wait_stream", "synchronize", "record", "record_current", "record_event", "record_stream"}
    | {"is_over", "query", "then"}
)


@dataclass(frozen=True, slots=True)
class Site:
    """One call. It is named by its function and its text, so that the name outlives changes of other lines.

    Calls with the same text are numbered in each function.
    """

    path: str
    function: str
    text: str
    position: tuple[int, int, int, int]  # first and last line, first and last column
    is_hold: bool = False  # not the call is left out, but what its callback holds

    @property
    def name(self) -> str:
        """The name in tables and reports."""
        return f"{self.path}: {self.call}"

    @property
    def call(self) -> str:
        """The name within its file."""
        return f"{self.function}: {self.text}" + (", memory" if self.is_hold else "")


def caller_is(site: Site, frame: FrameType | None) -> bool:
    """Checks whether a frame is at a site's call."""
    if frame is None or not frame.f_code.co_filename.endswith(site.path):
        return False
    for index, position in enumerate(frame.f_code.co_positions()):
        if index == frame.f_lasti // 2:
            return position == site.position
    return False


def sites() -> list[Site]:
    """Returns all calls of the rooms that may order a device's work."""
    found: list[Site] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            found += _Finder(path).found
    return found


def handed_on() -> list[str]:
    """Returns where a method that may order work is handed on without a call. Its calls have other names."""
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text())
            called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
            for node in ast.walk(tree):
                if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                    continue
                if node.attr in _METHODS and node not in called:
                    found.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)}")
    return found


def functions() -> set[str]:
    """Returns the names of all functions of the rooms."""
    return set().union(*(_Finder(path).functions for room in ROOMS for path in (ROOT / room).rglob("*.py")))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: Path) -> None:
        self.found: list[Site] = []
        self.functions: set[str] = set()
        self._path = str(path.relative_to(ROOT))
        self._names: list[str] = []
        self._assigned: dict[str, ast.expr] = {}  # the variables of the present function
        tree = ast.parse(path.read_text())
        self._holders = set(_functions_with_tensors(tree))
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node.name, node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._assigned[target.id] = node.value
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            self._add(node)
            if node.func.attr == "then" and self._holds_memory(node):
                self._add(node, is_hold=True)
        self.generic_visit(node)

    def _inside(self, name: str, node: ast.AST) -> None:
        self._names.append(name)
        self.functions.add(".".join(self._names))
        self.generic_visit(node)
        self._names.pop()

    def _add(self, node: ast.Call, *, is_hold: bool = False) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        position = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
        function, text, number = ".".join(self._names), ast.unparse(node.func), 1
        known = {site.text for site in self.found if site.function == function and site.is_hold is is_hold}
        while text in known:
            number += 1
            text = f"{ast.unparse(node.func)} ({number})"
        self.found.append(Site(self._path, function, text, position, is_hold))

    def _holds_memory(self, node: ast.Call) -> bool:
        named = [
            self._assigned[each.id] for each in node.args if isinstance(each, ast.Name) and each.id in self._assigned
        ]
        called = [each for root in (node, *named) for each in ast.walk(root) if isinstance(each, ast.Attribute)]
        return any(each.attr in self._holders for each in called)


def _functions_with_tensors(tree: ast.AST) -> Iterator[str]:
    """Yields the functions that take a tensor."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for argument in node.args.args:
                if argument.annotation is not None and ast.unparse(argument.annotation) == "torch.Tensor":
                    yield node.name


# The functions that may wait for the device.
HOST_WAITS = (
    "CudaStream._call_next",  # a stream's own thread
    "CudaStreams.__init__",  # sets the clock
    "Device.unpin",  # the end
    # In jobs, before the first step.
    "DeviceStates.__init__",
    "DeviceStates._restore",
    # In `windlass.offload`: the thread of the gradients, and the norm of a step that clips.
    "LayerUpdates._run_offloads",
    "OutsideParams.squared_norm",
)
