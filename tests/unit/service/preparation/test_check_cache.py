import os
import sys
import time
from pathlib import Path

import pytest

from windlass.service.preparation.check_cache import CheckCache
from windlass.service.preparation.pipeline import Preparation, PreparationError
from windlass.service.preparation.steps import PreparationStep, Results

_CHECK = (
    "import json, pathlib, sys\n"
    "counter, layout, result = map(pathlib.Path, sys.argv[1:])\n"
    "number = int(counter.read_text()) + 1 if counter.exists() else 1\n"
    "counter.write_text(str(number))\n"
    "layout.write_text(f'layout {number}')\n"
    "result.write_text(json.dumps({'ok': True, 'num_params': number}))\n"
)
_FAILING = _CHECK.replace("'ok': True", "'ok': False, 'error': {'code': 'c', 'message': 'm'}")


class Model:
    """A model folder, and a check whose result tells which check it was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        self.folder.mkdir()
        (self.folder / "config.json").write_text("{}")
        self._root = folder
        self._num_jobs = 0

    def check(self, *asked: str, code: str = _CHECK) -> Results:
        self._num_jobs += 1
        job = self._root / f"job-{self._num_jobs}"
        self.layout_file = job / "layout"
        kept = CheckCache(
            folder=self._root / "kept", model_dir=self.folder, layout_file=self.layout_file, asked=asked or ("bf16",)
        )
        result = job / "result.json"
        arguments = map(str, (self._root / "counter", self.layout_file, result))
        step = PreparationStep(
            name="check_model",
            command=(sys.executable, "-c", code, *arguments),
            result_path=result,
            timeout_s=60,
            kept=kept,
        )
        preparation = Preparation([step], work_dir=job)
        deadline = time.monotonic() + 60
        while (results := preparation.poll()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return results

    def number(self, *asked: str) -> int:
        """The number of the check that gave the result, taken from the result and from the layout."""
        number: int = self.check(*asked)["check_model"]["num_params"]
        assert self.layout_file.read_text() == f"layout {number}"
        return number


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def test_a_model_is_checked_once_for_each_way_of_training_it(model: Model) -> None:
    assert [model.number(), model.number(), model.number("fp32"), model.number()] == [1, 1, 2, 1]


@pytest.mark.parametrize("change", ["other size", "other time", "another file", "one file less"])
def test_a_model_that_has_changed_is_checked_again(model: Model, change: str) -> None:
    config = model.folder / "config.json"
    assert model.number() == 1
    if change == "other size":
        status = config.stat()
        config.write_text("{ }")
        os.utime(config, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "other time":
        os.utime(config, ns=(1, 1))
    elif change == "another file":
        (model.folder / "model.safetensors").touch()
    else:
        config.unlink()
    assert [model.number(), model.number()] == [2, 2]


def test_a_check_that_failed_is_made_again(model: Model) -> None:
    with pytest.raises(PreparationError):
        model.check(code=_FAILING)
    assert model.number() == 2


def test_damaged_result_is_not_used(model: Model, tmp_path: Path) -> None:
    assert model.number() == 1
    (kept,) = (tmp_path / "kept").iterdir()
    for text in ("", "[]", "{}", '{"result": {}}', '{"result": {}, "layout": 1}'):
        kept.write_text(text)
        assert model.number() > 1


def test_only_latest_results_are_kept(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.service.preparation.check_cache._MOST_KEPT", 2)
    for precision in ("a", "b", "c"):
        model.number(precision)
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert [model.number("c"), model.number("b"), model.number("a")] == [3, 2, 4]
