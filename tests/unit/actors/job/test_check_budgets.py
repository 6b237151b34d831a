"""Budgets that are too small for a job without a plan are found before it starts."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.support.training import make_spec
from windlass.actors.job import check_budgets
from windlass.actors.job.spec import JobSpec
from windlass.amounts import GIB
from windlass.engine.memory_plan.plan import PlanError


def refusal(spec: JobSpec) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check_budgets.check_budgets(spec)
    assert re.search(r"(?<![.\d])\d{6}", str(caught.value)) is None, "no raw number of bytes"
    return caught.value


def test_check_budgets_of_the_device_says_what_takes_it_and_the_least_that_works(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, device_memory_nbytes=100_000, num_microbatches=2)
    error = refusal(spec)
    assert error.param == "windlass.budgets.gpu_memory_gib"
    for words in (
        "of device memory (",
        "params in flight ",
        "more than its budget of 97.66 KiB",
        "num_microbatches (now 2",
    ):
        assert words in str(error)
    (least,) = re.findall(r"set gpu_memory_gib, .*, to at least ([\d.]+),", str(error))
    enough = int(float(least) * GIB)
    assert check_budgets.check_budgets(replace(spec, device_memory_nbytes=enough)) == []
    refusal(replace(spec, device_memory_nbytes=int(0.99 * enough)))


def test_check_budgets_of_host_memory_says_what_takes_it_and_the_least_that_works(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, host_memory_nbytes=100_000)
    error = refusal(spec)
    assert error.param == "windlass.budgets.host_memory_gib"
    assert "states at the optimizers " in str(error)
    (least,) = re.findall(r"set host_memory_gib, .*, to at least ([\d.]+)", str(error))
    assert check_budgets.check_budgets(replace(spec, host_memory_nbytes=int(float(least) * GIB))) == []


@pytest.mark.parametrize(("nbytes", "is_enough"), [(100_000, False), (1 << 30, True)])
def test_check_budgets_as_a_process_writes_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, is_enough: bool
) -> None:
    spec = make_spec(tmp_path, device_memory_nbytes=nbytes)
    order, result = tmp_path / "spec.json", tmp_path / "result.json"
    order.write_bytes(TypeAdapter(JobSpec).dump_json(spec))
    monkeypatch.setattr(sys, "argv", ["check_budgets", "--spec", str(order), "--result", str(result)])
    check_budgets.main()
    found: dict[str, Any] = json.loads(result.read_text())
    assert found["ok"] == is_enough
    if not is_enough:
        assert found["error"]["code"] == "does_not_fit"
        assert found["error"]["param"] == "windlass.budgets.gpu_memory_gib"
