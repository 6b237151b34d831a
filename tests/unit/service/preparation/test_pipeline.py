"""Preparation runs its steps in order, under limits, and turns every failure into a job's error."""

import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.engine.folders import PLAIN_TEMPLATE, make_tokenizer, make_tokenizer_folder
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.yaml_files import load
from windlass.planner.question.plan_request import PlanRequest
from windlass.service.preparation import pipeline as preparation
from windlass.service.preparation import steps as preparation_steps
from windlass.service.preparation.pipeline import Preparation, PreparationError, StepFailedError, preparation_of
from windlass.service.preparation.sandbox.process import LimitedCommand, start_limited
from windlass.service.preparation.steps import (
    MEASURE_BLOCKS,
    PLAN_JOB,
    PreparationOrder,
    PreparationStep,
    Results,
    plan_step,
    plan_steps_apart,
    step_server,
)
from windlass.storage.ids import Precision


def _step(tmp_path: Path, code: str, *, name: str = "first", timeout_s: int = 60) -> PreparationStep:
    result = tmp_path / f"{name}.json"
    program = f"import json, os, sys, time\nresult = {str(result)!r}\n{code}"
    return PreparationStep(name=name, command=(sys.executable, "-c", program), result_path=result, timeout_s=timeout_s)


def _finish(preparation: Preparation, timeout_s: float = 60.0) -> dict[str, dict[str, object]]:
    deadline = time.monotonic() + timeout_s
    while (results := preparation.poll()) is None:
        assert time.monotonic() < deadline, "the preparation did not end"
        time.sleep(0.02)
    return results


_OK = "json.dump({'ok': True, 'time': time.time()}, open(result, 'w'))"


def test_steps_run_one_after_the_other(tmp_path: Path) -> None:
    steps = [_step(tmp_path, _OK, name="first"), _step(tmp_path, _OK, name="second")]
    results = _finish(Preparation(steps, work_dir=tmp_path / "work"))
    assert list(results) == ["first", "second"]
    assert float(str(results["first"]["time"])) < float(str(results["second"]["time"]))


def test_preparation_with_a_step_that_the_results_leave_out_goes_on_without_it(tmp_path: Path) -> None:
    def unless_first(results: Results) -> PreparationStep | None:
        return None if "first" in results else _step(tmp_path, _OK, name="left out")

    steps = [_step(tmp_path, _OK, name="first"), unless_first, _step(tmp_path, _OK, name="second"), unless_first]
    assert list(_finish(Preparation(steps, work_dir=tmp_path / "work"))) == ["first", "second"]


def test_optional_step_that_fails_leaves_its_error_and_the_preparation_goes_on(tmp_path: Path) -> None:
    refusal = "json.dump({'ok': False, 'error': {'code': 'odd', 'message': 'it is odd'}}, open(result, 'w'))"
    steps = [
        dataclasses.replace(_step(tmp_path, refusal, name="plan_job@a"), is_optional=True),
        dataclasses.replace(_step(tmp_path, "sys.exit(3)", name="plan_job@b"), is_optional=True),
        _step(tmp_path, _OK, name="second"),
    ]
    results = _finish(Preparation(steps, work_dir=tmp_path))
    assert results["plan_job@a"]["error"] == {"code": "odd", "message": "it is odd"}
    failed = results["plan_job@b"]["error"]
    assert isinstance(failed, dict)
    assert failed["message"].startswith("planning ended")
    assert results["second"]["ok"]


def test_an_error_of_the_first_step_ends_it_with_that_error(tmp_path: Path) -> None:
    error = {
        "code": "invalid_file",
        "message": "training.jsonl, line 3, field messages: empty",
        "param": "training_file",
    }
    failing = _step(tmp_path, f"json.dump({{'ok': False, 'error': {error!r}}}, open(result, 'w')); sys.exit(1)")
    second = _step(tmp_path, _OK, name="second")
    with pytest.raises(PreparationError) as raised:
        _finish(Preparation([failing, second], work_dir=tmp_path))
    assert (raised.value.code, raised.value.message, raised.value.param) == tuple(error.values())
    assert not second.result_path.exists()


def test_a_stale_result_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    step = _step(tmp_path, "sys.exit(3)")
    step.result_path.write_text(json.dumps({"ok": True}))
    with pytest.raises(PreparationError, match=r"first ended with exit code 3 .*prepare\.log"):
        _finish(Preparation([step], work_dir=tmp_path))


_STAGES = {
    preparation_steps.DOWNLOAD_MODEL: "the download of the model",
    preparation_steps.CHECK_MODEL: "the check of the model",
    preparation_steps.PREPARE_DATA: "the preparation of the data",
    preparation_steps.PLAN_JOB: "planning",
    preparation_steps.PLAN_STAGES: "planning over several boxes",
}
_KILLED = "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(("name", "title"), _STAGES.items())
def test_a_killed_step_is_told_by_signal_time_limit_and_remedy(tmp_path: Path, name: str, title: str) -> None:
    with pytest.raises(StepFailedError) as raised:
        _finish(Preparation([_step(tmp_path, f"print('on it', flush=True); {_KILLED}", name=name)], work_dir=tmp_path))
    assert raised.value.code == f"{name}_failed"
    told = raised.value.message
    assert re.fullmatch(
        rf"{title} was killed by signal 9 \(SIGKILL\) after \d+ s, most likely because the machine ran out of memory "
        r"\([\d.]+ GiB are free without it; its limit was [\d.]+ GiB\), and left no result; last output line: on it\. "
        rf"Wait until other jobs .*, or add memory, and submit the job again$",
        told,
    )


def test_a_step_that_reaches_its_memory_limit_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=0))
    with pytest.raises(
        StepFailedError, match=r"it got no more memory of at most 1\.5 GiB \(MemoryError\)\. Wait until"
    ):
        _finish(Preparation([_step(tmp_path, "bytearray(1536 << 20)")], work_dir=tmp_path))


def test_what_another_step_printed_is_not_taken_for_the_last_line(tmp_path: Path) -> None:
    steps = [_step(tmp_path, f"print('MemoryError', flush=True); {_OK}"), _step(tmp_path, "sys.exit(3)", name="second")]
    with pytest.raises(
        StepFailedError, match=r"second ended with exit code 3 after \d+ s, and left no result\. Submit"
    ):
        _finish(Preparation(steps, work_dir=tmp_path))


@pytest.mark.parametrize("result", ["[]", "{}", '"ok"', '{"ok": false}', '{"ok": false, "error": {}}'])
def test_a_result_that_is_none_fails_the_step(tmp_path: Path, result: str) -> None:
    with pytest.raises(StepFailedError, match=r"first ended with exit code 0 .* left no result"):
        _finish(Preparation([_step(tmp_path, f"open(result, 'w').write({result!r})")], work_dir=tmp_path))


def test_a_step_that_hangs_is_killed(tmp_path: Path) -> None:
    pid_path = tmp_path / "pid"
    step = _step(tmp_path, f"open({str(pid_path)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)", timeout_s=1)
    with pytest.raises(PreparationError, match="did not end within 1 s") as raised:
        _finish(Preparation([step], work_dir=tmp_path))
    assert raised.value.code == "first_timeout"
    if pid_path.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_path.read_text()), 0)


def test_a_step_that_burns_time_is_ended_by_its_cpu_limit(tmp_path: Path) -> None:
    step = _step(tmp_path, "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 6))\nwhile True: pass")
    with pytest.raises(PreparationError, match="CPU time"):
        _finish(Preparation([step], work_dir=tmp_path))


def test_limits_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    code = (
        "import resource as r\n"
        "json.dump({'ok': True, 'environment': dict(os.environ),"
        " 'oom_score': open('/proc/self/oom_score_adj').read(),"
        " 'limits': [r.getrlimit(l) for l in (r.RLIMIT_CPU, r.RLIMIT_AS, r.RLIMIT_CORE)]}, open(result, 'w'))"
    )
    results = _finish(Preparation([_step(tmp_path, code, timeout_s=67)], work_dir=tmp_path))
    cpu, address_space, core = results["first"]["limits"]  # type: ignore[misc]
    assert cpu == [67, 72]
    assert 0 < address_space[0] < 2**62
    assert core == [0, 0]
    assert int(str(results["first"]["oom_score"])) == 1000
    environment = results["first"]["environment"]
    assert isinstance(environment, dict)
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & environment.keys()
    assert environment["HOME"] == str(tmp_path)


@pytest.mark.parametrize("visible", [None, "1"])
def test_steps_that_use_gpus_see_those_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    code = (
        "import resource as r\n"
        "json.dump({'ok': True, 'visible': os.environ.get('CUDA_VISIBLE_DEVICES'),"
        " 'limit': r.getrlimit(r.RLIMIT_AS)[0] == r.RLIM_INFINITY}, open(result, 'w'))"
    )
    steps = [_step(tmp_path, code), dataclasses.replace(_step(tmp_path, code, name="second"), sees_gpus=True)]
    results = _finish(Preparation(steps, work_dir=tmp_path))
    assert results["first"] == {"ok": True, "visible": "", "limit": False}
    assert results["second"] == {"ok": True, "visible": visible, "limit": True}


def test_step_measures_only_while_its_marker_is_there(tmp_path: Path) -> None:
    step = dataclasses.replace(_step(tmp_path, "time.sleep(60)"), instead=_step(tmp_path, _OK))
    step.measuring_path.touch()  # left by an earlier preparation
    made = Preparation([step], work_dir=tmp_path)
    made.poll()
    assert not made.measures
    step.measuring_path.touch()
    assert made.measures
    step.measuring_path.unlink()
    assert not made.measures
    made.stop()


@pytest.mark.parametrize("code", ["sys.exit(3)", "time.sleep(60)", "os.abort()"])
def test_failed_step_with_alternative_runs_the_alternative(tmp_path: Path, code: str) -> None:
    instead = _step(tmp_path, _OK)
    step = dataclasses.replace(_step(tmp_path, code, timeout_s=1), instead=instead)
    made = Preparation([step, _step(tmp_path, _OK, name="second")], work_dir=tmp_path)
    assert list(_finish(made)) == ["first", "second"]
    (warning,) = made.warnings
    assert re.match(r"First (ended with exit code 3|did not end within 1 s|crashed with signal 6 \(SIGABRT\))", warning)
    assert warning.endswith(". It is done in another way")


def test_step_that_returns_an_error_does_not_run_its_alternative(tmp_path: Path) -> None:
    told = {"ok": False, "error": {"code": "no_plan", "message": "too large"}}
    step = dataclasses.replace(_step(tmp_path, f"json.dump({told}, open(result, 'w'))"), instead=_step(tmp_path, _OK))
    with pytest.raises(PreparationError, match="too large"):
        _finish(Preparation([step], work_dir=tmp_path))


@pytest.mark.parametrize(
    ("num_gpus", "threads", "may_measure", "is_alone", "measures"),
    [
        (1, 4, True, True, True),
        (1, 4, True, False, False),
        (1, 4, False, True, False),
        (1, None, True, True, False),
        (0, 4, True, False, True),
        (0, 4, False, True, False),
    ],
)
def test_the_planner_may_measure_and_need_not(
    tmp_path: Path, num_gpus: int, threads: int | None, *, may_measure: bool, is_alone: bool, measures: bool
) -> None:
    asked = _plan_request(tmp_path, num_gpus, threads, may_measure=may_measure, is_alone=is_alone)
    step = plan_step(tmp_path, asked)
    assert step.sees_gpus is (measures and num_gpus > 0)
    assert _asked(step) == asked
    assert (step.instead is not None) is measures
    if step.instead is not None:
        assert step.num_threads == threads
        assert step.command[-2:] == ("--measuring", str(step.measuring_path))
        assert "--measuring" not in step.instead.command
        assert _asked(step.instead) == dataclasses.replace(asked, may_measure=False)
        assert not step.instead.sees_gpus


def _plan_request(
    folder: Path, num_gpus: int, threads: int | None, *, may_measure: bool = True, is_alone: bool = True
) -> PlanRequest:
    machine = load(Hardware, example_machines()["rtx4090-server"])
    return PlanRequest(
        model_dir=folder,
        hardware=machine.model_copy(update={"gpus": machine.gpus.model_copy(update={"count": num_gpus})}),
        training=TrainingConfig(batch_size=1, sequence_length=8, total_steps=1),
        num_optimizers=1,
        host_memory_nbytes=None,
        device_memory_nbytes=None,
        compute_threads=threads,
        may_measure=may_measure,
        is_alone=is_alone,
    )


@pytest.mark.parametrize("lacks", [True, False])
def test_plan_with_times_that_lack_is_made_again_after_their_measurement(tmp_path: Path, *, lacks: bool) -> None:
    asked = _plan_request(tmp_path, 0, 4)
    first, measure, plan = plan_steps_apart(tmp_path, asked)
    assert isinstance(first, PreparationStep)
    assert (_asked(first), first.instead) == (dataclasses.replace(asked, measures_apart=True), None)
    assert not isinstance(measure, PreparationStep)
    assert not isinstance(plan, PreparationStep)
    results: Results = {PLAN_JOB: {"ok": True, "lacks_times": True} if lacks else {"ok": True, "plan": {}}}
    step = measure(results)
    if not lacks:
        assert step is plan(results) is None
        return
    assert step is not None
    assert (step.name, step.num_threads, _asked(step)) == (MEASURE_BLOCKS, 4, asked)
    assert step.instead is not None, "a plan by rates, if the measurement fails"
    unmeasured = dataclasses.replace(asked, may_measure=False)
    assert (step.instead.name, _asked(step.instead)) == (PLAN_JOB, unmeasured)
    assert plan(results) is None
    for alone in (True, False):
        last = plan({**results, MEASURE_BLOCKS: {"ok": True, "alone": alone}})
        assert last is not None
        assert _asked(last) == dataclasses.replace(unmeasured, is_alone=alone)


@pytest.mark.parametrize(("num_gpus", "threads"), [(1, None), (0, None)])
def test_plan_for_another_machine_is_one_step(tmp_path: Path, num_gpus: int, threads: int | None) -> None:
    asked = _plan_request(tmp_path, num_gpus, threads)
    (step,) = plan_steps_apart(tmp_path, asked)
    assert isinstance(step, PreparationStep)
    assert _asked(step) == asked


def test_plan_that_leaves_blocks_unmeasured_is_one_step(tmp_path: Path) -> None:
    asked = dataclasses.replace(_plan_request(tmp_path, 0, 4), leaves_unmeasured=True)
    (step,) = plan_steps_apart(tmp_path, asked)
    assert isinstance(step, PreparationStep)
    assert (_asked(step), step.instead) == (asked, None)


@pytest.mark.parametrize("is_alone_first", [False, True])
def test_step_that_measures_is_told_of_a_job_that_computes_as_it_begins_or_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_alone_first: bool
) -> None:
    monkeypatch.setattr(preparation, "_LOOK_S", 0.0)
    paths = _step(tmp_path, _OK)
    begins = f"open({str(paths.measuring_path)!r}, 'w')\n" if is_alone_first else ""
    waits = f"while not os.path.exists({str(paths.disturbed_path)!r}): time.sleep(0.01)\n"
    step = dataclasses.replace(_step(tmp_path, begins + waits + _OK), instead=_step(tmp_path, "sys.exit(3)"))
    made, answers = Preparation([step], work_dir=tmp_path), iter([is_alone_first])
    made.is_alone = lambda: next(answers, False)
    assert _finish(made)["first"]["ok"]


def _asked(step: PreparationStep) -> PlanRequest:
    path = Path(step.command[step.command.index("--question") + 1])
    return PlanRequest.from_json(json.loads(path.read_text()))


def test_a_file_of_weights_that_is_larger_than_the_limit_can_be_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_LEAST_ADDRESS_SPACE_NBYTES", 1 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=0))  # the limit of a small machine
    (tmp_path / "model").mkdir()
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        with (tmp_path / "model" / f"{name}.safetensors").open("wb") as file:
            file.truncate(8 << 30)
    code = f"import mmap\nfile = open({str(tmp_path / 'model' / 'model-00002-of-00002.safetensors')!r}, 'rb')\n"
    step = _step(tmp_path, f"{code}mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n{_OK}")
    with pytest.raises(PreparationError):
        _finish(Preparation([step], work_dir=tmp_path))
    _finish(Preparation([dataclasses.replace(step, maps=tmp_path / "model")], work_dir=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    "part",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ raise_exception('\\0\\ud800' * 1000) }}",
    ],
    ids=["time", "memory", "words"],
)
@pytest.mark.parametrize("is_forked", [False, True], ids=["anew", "forked"])
def test_a_hostile_template_ends_its_job_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, is_forked: bool
) -> None:
    monkeypatch.setitem(preparation_steps._TIMEOUTS_S, preparation_steps.PREPARE_DATA, 30)
    # The limit of a small machine, because a test must not use this one's memory.
    monkeypatch.setattr(preparation, "_LEAST_ADDRESS_SPACE_NBYTES", 6 * 1024**3)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=0))
    order = _order(tmp_path, random_weights=True)
    make_tokenizer_folder(order.model_dir, make_tokenizer(part + PLAIN_TEMPLATE))
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    order.training_file.write_text(json.dumps(line) + "\n")
    order = dataclasses.replace(order, validation_file=None)
    steps = [
        step for step in preparation_of(order)._steps if getattr(step, "name", "") == preparation_steps.PREPARE_DATA
    ]
    server = step_server(tmp_path / "server.log")
    start = server.start if is_forked else start_limited
    with pytest.raises(PreparationError) as raised:
        _finish(Preparation(steps, work_dir=order.work_dir, start=start), timeout_s=120)
    server.close()
    assert len(raised.value.message) < 5000


@pytest.mark.long
def test_the_modules_of_steps_may_be_forked_from(tmp_path: Path) -> None:
    """Their imports start no threads. Otherwise each would start in a process of its own."""
    order = _order(tmp_path, random_weights=True)
    server = step_server(tmp_path / "server.log")
    try:
        for module in (
            "windlass.engine.checkpoint.check_model",
            "windlass.engine.data.tokenize",
            "windlass.planner.answers.job_process",
            "windlass.planner.answers.stages_process",
        ):
            command = (sys.executable, "-m", module, "--help")
            log_path = tmp_path / "log"
            with log_path.open("wb") as log:
                limited = LimitedCommand(command=command, home=tmp_path, cpu_s=60, address_space_nbytes=16 << 30)
                assert server.start(limited, log).wait() == 0
            assert f"usage: {module}" in log_path.read_text()
        order.model_dir.mkdir()
        with pytest.raises(PreparationError) as raised:
            _finish(preparation_of(order, server.start))
        assert raised.value.code == "invalid_model"
    finally:
        server.close()
    assert (tmp_path / "server.log").read_text() == ""


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[Preparation]:
    preparation = Preparation([_step(tmp_path, "time.sleep(60)")], work_dir=tmp_path)
    yield preparation
    preparation.stop()


def test_stop_ends_the_process(sleeping: Preparation) -> None:
    assert sleeping.poll() is None
    process = sleeping._process
    assert process is not None
    sleeping.stop()
    assert process.poll() == -signal.SIGKILL
    sleeping.stop()


def _order(tmp_path: Path, *, random_weights: bool) -> PreparationOrder:
    return PreparationOrder(
        model="organization/tiny",
        model_dir=tmp_path / "model",
        training_file=tmp_path / "train",
        training_name="-a.jsonl (file-1)",
        validation_file=tmp_path / "valid",
        validation_name="b.jsonl (file-2)",
        sequence_length=128,
        precision=Precision.FP32,
        random_weights=random_weights,
        layout_file=tmp_path / "layout.json",
        dataset_dir=tmp_path / "dataset",
        work_dir=tmp_path / "work",
        day=date(2026, 7, 9),
    )


def _commands(preparation: Preparation) -> list[str]:
    return [" ".join(step.command[2:]) for step in preparation._steps]


def test_the_real_steps_check_the_model_then_prepare_into_a_new_folder(tmp_path: Path) -> None:
    for folder in ("model", "dataset"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dataset" / "left over").touch()
    preparation = preparation_of(_order(tmp_path, random_weights=True))
    assert not (tmp_path / "dataset").exists()
    assert [step.maps for step in preparation._steps] == [tmp_path / "model", None]
    assert _commands(preparation) == [
        f"windlass.engine.checkpoint.check_model --model-dir {tmp_path}/model --precision fp32"
        f" --layout-file {tmp_path}/layout.json --random-weights --result {tmp_path}/work/check_model.json",
        f"windlass.engine.data.tokenize --model-dir {tmp_path}/model --training-file {tmp_path}/train"
        f" --training-name=-a.jsonl (file-1) --validation-file {tmp_path}/valid --validation-name=b.jsonl (file-2)"
        f" --sequence-length 128 --output-dir {tmp_path}/dataset"
        f" --day 2026-07-09 --progress {tmp_path}/work/prepare_data.progress"
        f" --result {tmp_path}/work/prepare_data.json",
    ]


def test_a_model_that_is_not_here_is_downloaded_first_by_the_one_step_that_may_talk_to_the_hub(tmp_path: Path) -> None:
    preparation = preparation_of(_order(tmp_path, random_weights=False))
    assert _commands(preparation)[0] == (
        f"windlass.service.preparation.hub_download --model organization/tiny --model-dir {tmp_path}/model"
        f" --result {tmp_path}/work/download_model.json"
    )
    assert ["HF_TOKEN" in step.passed_on for step in preparation._steps] == [True, False, False]


def test_results_of_ended_preparation_can_be_polled_again(tmp_path: Path) -> None:
    """The caller may have failed to store the results."""
    preparation = Preparation([_step(tmp_path, _OK)], work_dir=tmp_path)
    results = _finish(preparation)
    assert preparation.poll() == results
