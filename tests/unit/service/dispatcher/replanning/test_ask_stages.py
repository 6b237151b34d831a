"""The planner's process for a job over several boxes."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import make_spec
from windlass.planner.stages.stages_request import RequestedBox, StagesRequest
from windlass.service.dispatcher.replanner import ask_stages
from windlass.service.jobs.stage_plans import stages_of_answer
from windlass.service.preparation.pipeline import Preparation, PreparationError
from windlass.service.preparation.sandbox.process import LimitedCommand, start_limited
from windlass.service.preparation.steps import PLAN_STAGES, Results

DEADLINE_S = 240.0


def asked(root: Path, num_boxes: int) -> StagesRequest:
    spec = make_spec(root, num_microbatches=2)
    box: dict[str, Any] = {"num_optimizers": 1, "host_memory_nbytes": None, "device_memory_nbytes": None}
    return StagesRequest(
        model_dir=Path(spec.model_dir),
        layout_file=Path(spec.layout_file),
        dataset_dir=Path(spec.dataset_dir),
        training=spec.training,
        boxes=tuple(RequestedBox(name=f"box-{index}", hardware=None, **box) for index in range(num_boxes)),
    )


def finish(preparation: Preparation) -> Results:
    until_s = time.monotonic() + DEADLINE_S
    try:
        while (results := preparation.poll()) is None:
            assert time.monotonic() < until_s
            time.sleep(0.05)
    finally:
        preparation.stop()
    return results


def test_planner_process_for_several_boxes_is_limited_and_sees_no_gpu(tmp_path: Path) -> None:
    request, commands = asked(tmp_path / "job", 2), list[LimitedCommand]()

    def start(command: LimitedCommand, log: Any) -> Any:
        commands.append(command)
        raise InterruptedError

    stale = tmp_path / "work" / "plan_stages.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    with pytest.raises(InterruptedError):
        ask_stages(tmp_path / "work", request, start).poll()
    (limited,) = commands
    assert not stale.exists()
    assert limited.memory_nbytes
    assert not limited.sees_gpus
    path = Path(limited.command[limited.command.index("--question") + 1])
    assert StagesRequest.from_json(json.loads(path.read_text())) == request


@pytest.mark.long
def test_planner_process_for_several_boxes_answers_with_a_plan_or_the_reason(tmp_path: Path) -> None:
    answer = finish(ask_stages(tmp_path / "work", asked(tmp_path / "job", 2), start_limited))[PLAN_STAGES]
    plan = stages_of_answer(answer)
    assert [stage.box for stage in plan.stages] == ["box-0", "box-1"]
    with pytest.raises(PreparationError, match="has 3 layers, and each of the job's 4 boxes needs one") as raised:
        finish(ask_stages(tmp_path / "work", asked(tmp_path / "other", 4), start_limited))
    assert raised.value.code == "not_divisible"
