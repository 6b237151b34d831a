"""The GPU check on a machine without a GPU: all of it on small models, and its reports of errors."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import benchmark as gpu_check
from benchmarks.gpu_check import parity as gpu_parity
from benchmarks.gpu_check import peers as gpu_peers
from benchmarks.gpu_check import speed as gpu_speed
from benchmarks.gpu_check.cases import CAPS, SHAPES, SpeedCase, States, cases, tiny_cases
from benchmarks.peers.contenders import ContenderRun
from benchmarks.peers.workload import model_config
from benchmarks.reporting.report import Report
from tests.unit.benchmarks.torch_only import link_torch_only
from windlass.actors.job.context import GPU_WORKER, SCHEDULER
from windlass.actors.messages import BlockComputed, ComputeProgressed, Loss, Phase
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.model.partition import build_meta_model
from windlass.storage.ids import BlockIndex, JobId, Kernel, Precision, Step
from windlass.storage.memory.capacity import InsufficientSpaceError

FAR_S = 1e9


@pytest.fixture(scope="module")
def torch_only(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that finds torch, transformers and small packages, and no others."""
    site = tmp_path_factory.mktemp("torch-only") / "site"
    link_torch_only(site)
    root = Path(gpu_check.__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, root / "src", root)))}


def run_check(environment: dict[str, str], *options: str) -> "subprocess.CompletedProcess[str]":
    """Runs the check as `make gpu-check` does, but on the CPU."""
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_check", "--device", "cpu", "--tiny", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def tiny(name: str) -> SpeedCase:
    return next(case for case in tiny_cases() if case.name == name)


def measured(folder: Path, *chosen: SpeedCase, until_s: float = FAR_S) -> list[gpu_speed.SpeedRun]:
    runs = gpu_speed.measure(chosen, folder, device="cpu", caps=CAPS, compiles=False, until_s=until_s)
    return list(runs)


# --- the whole check -----------------------------------------------------------------------------------------------


def test_gpu_check_where_only_torch_and_transformers_are_installed_trains(
    torch_only: dict[str, str], tmp_path: Path
) -> None:
    look = [sys.executable, "-S", "-c", "import pydantic"]
    assert "No module named 'pydantic'" in subprocess.run(look, env=torch_only, capture_output=True, text=True).stderr

    done = run_check(torch_only, "--part", "speed", "--only", "1.5B host 16 as", "--directory", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]["1.5B host 16 as zero_offload"] > 0


@pytest.mark.long
def test_gpu_check_with_small_models_runs_all_cases(torch_only: dict[str, str], tmp_path: Path) -> None:
    done = run_check(torch_only, "--directory", str(tmp_path), "--reports", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["num_wrong"] == 0
    assert found["loss_difference_max"].keys() == {"fp32", "bf16", "fp16"}
    assert all(0 <= found["loss_difference_max"][str(each)] <= limit for each, limit in gpu_parity.LIMITS.items())
    names = {case.name for case in tiny_cases()}
    for key in ("tokens_per_s", "share_of_peak", "share_of_peak_without_recompute", "overlap_efficiency"):
        assert found[key].keys() == names
        assert min(found[key].values()) > 0
    assert set(found["gpu_peak_gib"].values()) == {None}
    assert min(found["host_peak_gib"].values()) > 0
    shares = found["share_of_peak"]
    assert found["share_of_peak_min_from_batch_16"] == {
        "host": min(shares["1.5B host 16"], shares["7B host 32"]),
        "SSD": shares["1.5B SSD 16"],
    }
    assert min(found["over_zero_infinity_schedule"], found["over_zero_offload_schedule"]) > 0
    assert found["over_deepspeed_zero_infinity"] is found["over_deepspeed_zero_offload"] is None
    (report,) = tmp_path.glob("*-gpu_check.md")
    text = report.read_text()
    assert text.endswith(done.stdout.splitlines()[-1] + "\n")
    assert text.count("| equal ") == len(gpu_parity.cases(compiles=False))
    assert [name for name in names if len(re.findall(rf"^\| {name} +\|", text, re.MULTILINE)) != 2] == []
    assert list(tmp_path.iterdir()) == [report]


def test_gpu_check_without_a_gpu_says_so_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 0
    assert "gpu-check skipped: this machine has no CUDA device" in capsys.readouterr().out


# --- the cases -----------------------------------------------------------------------------------------------------


def test_parity_meets_every_pair_of_settings() -> None:
    found = gpu_parity.cases(compiles=True)
    settings: dict[str, Callable[[gpu_parity.ParityCase], Any]] = {
        "place": lambda case: case.place,
        "micro-batches": lambda case: case.num_microbatches,
        "tied": lambda case: case.is_tied,
        "precision": lambda case: case.precision,
        "operations at once": lambda case: case.num_ahead,
    }
    for value in settings.values():
        pairs = {(case.activations, case.swaps_to_ssd, value(case)) for case in found if case.kernel is Kernel.FUSED}
        values = {value(case) for case in found}
        assert pairs == {(*way, each) for way, each in product(gpu_parity.ACTIVATIONS, values)}
    assert {case.precision for case in found if case.kernel is None and case.place == "device"} == set(Precision)
    assert {activations for activations, _ in gpu_parity.ACTIVATIONS} == set(ActivationChoice)
    streamed = [(case.activations, case.swaps_to_ssd) for case in found if case.is_streamed]
    assert sorted(streamed) == sorted(gpu_parity.ACTIVATIONS)


def test_shapes_are_those_of_qwen() -> None:
    millions = {"0.5B": 494.0, "1.5B": 1543.7, "3B": 3085.9, "7B": 7615.6}
    for name, shape in SHAPES.items():
        assert shape.num_params / 1e6 == pytest.approx(millions[name], abs=0.1)
        assert build_meta_model(model_config(shape, 1024), Precision.BF16).num_parameters() == shape.num_params


def test_every_case_has_a_name_of_its_own_and_keeps_to_the_caps() -> None:
    assert len({case.name for case in cases()}) == len(cases())
    assert {case.batch_size for case in cases()} >= {4, 8, 16, 32}
    for case in cases():
        if case.states is States.HOST:
            assert case.state_nbytes < CAPS.host_nbytes[States.HOST]
    assert {case.state_nbytes / case.shape.num_params for case in cases()} == {12, 14}


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_case_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: dict[str, BaseException] = {
        "1.5B host 16": InsufficientSpaceError("the arena", "/dev/shm", 2 << 30, 1 << 30, "enlarge it"),
        "1.5B SSD 16": torch.OutOfMemoryError("CUDA out of memory"),
    }
    train = gpu_speed._train

    def fail_some(run: gpu_speed.SpeedRun, *args: Any, **options: Any) -> None:
        if run.case.name in errors:
            raise errors[run.case.name]
        train(run, *args, **options)

    monkeypatch.setattr(gpu_speed, "_train", fail_some)
    runs = measured(tmp_path, *map(tiny, [*errors, "7B host 32"]))
    assert [run.is_failure for run in runs] == [False, True, False]
    assert [run.tokens_per_s is None for run in runs] == [True, True, False]
    text = "\n".join(gpu_speed.tables(runs))
    assert "| not timed | InsufficientSpaceError: not enough room in shm for the arena: 2.00 GiB" in text
    assert "| failed    | OutOfMemoryError: CUDA out of memory" in text
    assert list(tmp_path.iterdir()) == []


def test_a_case_without_time_is_not_begun(tmp_path: Path) -> None:
    (run,) = measured(tmp_path, tiny("1.5B host 16"), until_s=time.monotonic() + 5)
    assert not run.is_failure
    assert run.reason is not None
    assert run.reason.startswith("no time: it takes 15 s or more, and ")


@pytest.mark.parametrize("name", ["1.5B host 16", "1.5B SSD 16"])
def test_a_case_ends_when_its_time_is_up(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "_CASE_LIMIT_S", -1.0)  # the time is up as soon as weights are loaded
    (run,) = measured(tmp_path, tiny(name))
    assert (run.reason, run.is_failure) == ("OutOfTimeError: its time was up before a step was timed", False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("loss", "verdict"), [(1.001, "DIFFERS"), (math.nan, "FAILED: RuntimeError: losses are not")])
def test_losses_that_differ_are_wrong(
    tmp_path: Path, loss: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parity, "losses_of", lambda spec: [1.0, loss])
    monkeypatch.setattr(gpu_parity, "train_plainly", lambda spec, device: type("Plain", (), {"losses": [1.0, 1.0]}))
    chosen = gpu_parity.cases(compiles=False)[:1]
    (run,) = gpu_parity.measure(chosen, tmp_path, device="cpu", num_steps=2, until_s=FAR_S)
    assert run.is_wrong
    assert f"| {verdict}" in "\n".join(gpu_parity.tables([run]))
    assert gpu_parity.keys([run])["num_wrong"] == 1


def test_activations_that_should_be_swapped_and_are_not_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(self: gpu_parity.ParityCase, spec: Any, num_blocks: int, device: str) -> Any:
        placed = placement_of(self, spec, num_blocks, device)
        monkeypatch.setattr(gpu_parity, "metrics_of", lambda spec, name: {1: 0})
        return placed

    placement_of = gpu_parity.ParityCase.placed
    monkeypatch.setattr(gpu_parity.ParityCase, "placed", keep)
    chosen = [case for case in gpu_parity.cases(compiles=False) if case.activations is ActivationChoice.SWAP][:1]
    (run,) = gpu_parity.measure(chosen, tmp_path, device="cpu", num_steps=2, until_s=FAR_S)
    assert run.is_wrong
    assert run.reason == "RuntimeError: 0 bytes of activations left the device, with the choice swap"


@pytest.mark.long
def test_gpu_check_that_hangs_ends_with_a_report(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom benchmarks import gpu_check\n"
        "gpu_check._GRACE_S = 0.0\ngpu_check._run_parity = lambda *_: time.sleep(600)\n"
        "gpu_check.main(sys.argv[1:])"
    )
    options = ["--device", "cpu", "--tiny", "--limit-s", "1", "--directory", str(tmp_path), "--reports", str(tmp_path)]
    command = [sys.executable, "-c", code, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Ended by force after 1 s" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["num_wrong"] == 0
    (report,) = tmp_path.iterdir()
    assert report.read_text().endswith(done.stdout.splitlines()[-1] + "\n")


def test_gpu_check_keeps_results_case_by_case(tmp_path: Path) -> None:
    check = gpu_check.Check(Report("GPU check", tmp_path, {}), tmp_path / "report.md", ("speed",), cases())
    assert not check.has_failed
    check.speeds.append(gpu_speed.SpeedRun(cases()[0], reason="CUDA is broken", is_failure=True))
    check.note("one is over")
    text = (tmp_path / "report.md").read_text()
    assert "CUDA is broken" in text
    assert json.loads(text.splitlines()[-1])["tokens_per_s"] == {case.name: None for case in cases()}
    assert check.has_failed


# --- peers ----------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "_is_missing", lambda: True)
    runs = list(gpu_peers.measure(tmp_path, gpu_nbytes=24 << 30, until_s=FAR_S))
    assert [run.run.missing for run in runs] == ["DeepSpeed is not installed"] * 2
    assert gpu_peers.keys(runs, [], cases()).keys() == {
        "over_deepspeed_zero_infinity",
        "over_zero_infinity_schedule",
        "over_deepspeed_zero_offload",
        "over_zero_offload_schedule",
    }
    assert set(gpu_peers.keys(runs, [], cases()).values()) == {None}
    assert list(tmp_path.iterdir()) == []


def test_peers_are_compared_with_the_equivalent_case() -> None:
    step_s = {"1.5B SSD 16": 2.0, "1.5B SSD 16 as zero_infinity": 5.0, "1.5B host 16": 1.0, "1.5B host 32": 9.0}
    speeds = [gpu_speed.SpeedRun(case, step_s=(step_s[case.name],)) for case in cases() if case.name in step_s]
    peers = [gpu_peers.PeerRun(gpu_peers.PEERS[0], ContenderRun(step_s=(8.0,)))]
    assert gpu_peers.keys(peers, speeds, cases()) == {
        "over_deepspeed_zero_infinity": 4.0,
        "over_zero_infinity_schedule": 2.5,
        "over_deepspeed_zero_offload": None,
        "over_zero_offload_schedule": None,
    }
    assert (gpu_peers.WORKLOAD.shape, gpu_peers.WORKLOAD.sequence_length) == (SHAPES["1.5B"], 1024)


def test_numbers_of_a_run() -> None:
    timelines = tuple(
        {"overlap_efficiency": each, "busy_s": {"ssd-0": 2 * each}, "stall_s": {"update": each, "between": 3.0}}
        for each in (0.5, 1.0)
    )
    peak_s: dict[ActivationChoice, float | None] = {gpu_speed.RECOMPUTE: 1.0, gpu_speed.KEEP: None}
    run = gpu_speed.SpeedRun(cases()[0], step_s=(4.0, 2.0, 1.0), timelines=timelines, peak_s=peak_s)
    assert run.tokens_per_s == 16 * 1024 / 2.0
    assert run.share_of_peak(gpu_speed.RECOMPUTE) == 0.5
    assert run.share_of_peak(gpu_speed.KEEP) is None
    assert run.overlap_efficiency == 0.75
    assert list(run.mean_s("stall_s").items()) == [("between", 3.0), ("update", 0.75)]
    assert dataclasses.replace(run, step_s=()).tokens_per_s is None


# --- waits of the host ------------------------------------------------------------------------------------------------

# Torch's message.
SYNCHRONIZED = "called a synchronizing CUDA operation"


def computed(step: int, *phases: Phase) -> ComputeProgressed:
    job = JobId("job")
    operations = tuple(
        BlockComputed(
            job=job,
            step=Step(step),
            op=op,
            phase=phase,
            block=BlockIndex(0),
            group=0,
            compute_s=1.0,
            is_finite=True,
            loss=None if phase is Phase.FORWARD else Loss(loss_sum=1.0, num_targets=1, num_correct=0),
        )
        for op, phase in enumerate(phases)
    )
    return ComputeProgressed(job=job, step=Step(step), actor=GPU_WORKER, computed=operations, grads=())


def test_waits_of_the_host_are_counted_after_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with gpu_parity.host_waits("cuda") as waits:
        for message in (
            computed(1, Phase.FORWARD, Phase.HEAD),
            computed(2, Phase.EVALUATE_HEAD),
            computed(2, Phase.FORWARD),
        ):
            waits.look(SCHEDULER, message)
        assert modes == []
        waits.look(SCHEDULER, computed(2, Phase.FORWARD, Phase.HEAD))
        assert modes == ["warn"]
        for text in (SYNCHRONIZED, "something else", SYNCHRONIZED):
            warnings.warn(text, stacklevel=1)
    assert modes == ["warn", "default"]
    assert waits.number == 2
    run = gpu_parity.ParityRun(case=gpu_parity.cases(compiles=False)[0], difference=0.0, num_waits=waits.number)
    assert run.is_wrong
    assert "| WAITS" in "\n".join(gpu_parity.tables([run]))
