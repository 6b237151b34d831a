"""The GPU check on a machine without a GPU: all of it on small models, its predictions, and its reports of errors."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import benchmark as gpu_check
from benchmarks.gpu_check import link as gpu_link
from benchmarks.gpu_check import parity as gpu_parity
from benchmarks.gpu_check import peers as gpu_peers
from benchmarks.gpu_check import prediction
from benchmarks.gpu_check import speed as gpu_speed
from benchmarks.gpu_check.case import Case, Result, ResultsFile, Setting, Status, named, run_case
from benchmarks.gpu_check.cases import SHAPES, ParityCase, PeerCase, SpeedCase, States, cases
from benchmarks.gpu_check.parity import Differences
from benchmarks.gpu_check.report import in_words, keys, report_lines
from benchmarks.gpu_check.watch import HostWaits, host_waits
from benchmarks.peers.contenders import ContenderFailedError
from benchmarks.peers.workload import model_config
from tests.unit.benchmarks.gpu_check.torch_only import link_torch_only
from windlass.actors.job.context import GPU_WORKER
from windlass.actors.messages import BlockComputed, ComputeProgressed, Loss, Phase
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.model.partition import build_meta_model
from windlass.storage.ids import BlockIndex, JobId, Kernel, Precision, Step
from windlass.storage.memory.capacity import InsufficientSpaceError

GIB = 2**30
FIRST_FOUR = ["link", "parity-bf16", "speed-7B-host-16", "speed-1.5B-ssd-16"]
ASKED_FOR = {"step_over_compute_only", "step_over_plain", "reserved_over_planned", "host_waits", "step_error_max"}


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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)


def tiny(name: str) -> Case:
    return next(case for case in cases(is_tiny=True) if case.name == name)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(root=tmp_path, results=ResultsFile(tmp_path / "check.jsonl"), device="cpu", is_tiny=True)


# --- the whole check -----------------------------------------------------------------------------------------------


def test_gpu_check_where_only_torch_and_transformers_are_installed_trains(
    torch_only: dict[str, str], tmp_path: Path
) -> None:
    look = [sys.executable, "-S", "-c", "import pydantic"]
    assert "No module named 'pydantic'" in subprocess.run(look, env=torch_only, capture_output=True, text=True).stderr
    name = "speed-1.5B-host-16-as-zero_offload"

    done = run_check(torch_only, "--only", name, "--directory", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["tokens_per_s"][name] > 0
    assert f"case 1 of 1: {name} begins, about " in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(1200)  # many processes, and other tests beside them
def test_gpu_check_with_small_models_runs_all_cases(torch_only: dict[str, str], tmp_path: Path) -> None:
    folder, reports = tmp_path / "work", tmp_path / "reports"
    folder.mkdir()
    done = run_check(torch_only, "--directory", str(folder), "--reports", str(reports))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["num_wrong"] == 0
    assert found["loss_difference_max"].keys() == found["param_difference_max"].keys() == {"fp32", "bf16", "fp16"}
    speeds = {case.name for case in cases(is_tiny=True) if isinstance(case, SpeedCase)}
    for key in ("tokens_per_s", "share_of_peak", "share_of_peak_without_recompute", "overlap_efficiency"):
        assert found[key].keys() == speeds
        assert min(found[key].values()) > 0
    assert min(found[key] for key in ("step_over_compute_only", "step_over_plain", "step_error_max")) > 0
    assert found["reserved_over_planned"] is found["host_waits"] is None
    assert min(found["share_of_peak_min_from_batch_16"].values()) > 0
    assert found["over_zero_infinity_schedule"] > 0
    assert found["over_deepspeed_zero_infinity"] is found["over_deepspeed_zero_offload"] is None

    (lines,) = reports.glob("*-gpu_check.jsonl")
    results = ResultsFile(lines).read()
    assert list(results) == [case.name for case in cases(is_tiny=True)]
    assert {each.case for each in results.values() if each.status is not Status.DONE} == {
        "deepspeed-zero_infinity",
        "deepspeed-zero_offload",
    }
    predicted = [json.loads(line) for line in lines.with_suffix(".predicted.jsonl").read_text().splitlines()]
    assert {each["case"]: each["predicted"] for each in predicted} == {name: results[name].predicted for name in speeds}
    text = lines.with_suffix(".md").read_text()
    assert text.endswith(done.stdout.splitlines()[-1] + "\n")
    assert [name for name in speeds if len(re.findall(rf"^\| {name} +\|", text, re.MULTILINE)) != 3] == []
    assert lines.with_suffix(".worst-trace.json.gz").name in text
    assert list(folder.iterdir()) == []

    again = run_check(torch_only, "--resume", "--directory", str(folder), "--reports", str(reports))
    assert again.stdout.count(" is done\n") == len(results) - 2
    assert json.loads(again.stdout.splitlines()[-1]) == found


def test_gpu_check_without_a_gpu_says_so_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 0
    assert capsys.readouterr().out == "gpu-check skipped: this machine has no CUDA device that torch can use\n"


def test_gpu_check_lists_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [case.name for case in cases()]
    assert gpu_check.main(["--only", "13B"]) == 2
    assert "no case has '13B' in its name; there are link, parity-bf16" in capsys.readouterr().out


# --- the cases -----------------------------------------------------------------------------------------------------


def test_cases_are_few_and_the_first_answer_most() -> None:
    listed = cases()
    assert [case.name for case in listed[:4]] == FIRST_FOUR
    assert len({case.name for case in listed}) == len(listed) <= 21
    assert sum(case.expected_s for case in listed[:4]) < 630
    assert max(case.expected_s for case in listed) <= 420
    speeds = [case for case in listed if isinstance(case, SpeedCase)]
    assert {(case.model, case.states) for case in speeds} >= set(product(("1.5B", "3B", "7B"), States))
    assert {case.num_microbatches for case in speeds} >= {1, 4, 16}
    assert {case.has_cap for case in speeds} == {True, False}


def test_the_tiny_form_has_one_case_of_each_kind() -> None:
    names = [case.name for case in cases(is_tiny=True)]
    assert names[:4] == FIRST_FOUR
    assert len(names) == 14
    assert {case.part for case in cases(is_tiny=True)} == {case.part for case in cases()}


def test_only_takes_a_whole_name_before_a_part_of_one() -> None:
    assert [case.name for case in named(cases(), "speed-7B-host-16")] == ["speed-7B-host-16"]
    assert [case.name for case in named(cases(), "7B-host")] == [
        "speed-7B-host-16",
        "speed-7B-host-16-all",
        "speed-7B-host-64",
    ]


def test_parity_meets_every_pair_of_settings() -> None:
    found = [each for precision in Precision for each in gpu_parity.variants(precision, compiles=True)]
    settings: dict[str, Callable[[gpu_parity.Variant], Any]] = {
        "place": lambda each: each.place,
        "micro-batches": lambda each: each.num_microbatches,
        "tied": lambda each: each.is_tied,
        "precision": lambda each: each.precision,
        "operations at once": lambda each: each.num_ahead,
    }
    for value in settings.values():
        pairs = {(each.activations, each.swaps_to_ssd, value(each)) for each in found if each.kernel is Kernel.FUSED}
        values = {value(each) for each in found}
        assert pairs == {(*way, each) for way, each in product(gpu_parity.ACTIVATIONS, values)}
    assert {each.precision for each in found if each.kernel is None and each.place == "device"} == set(Precision)
    assert {activations for activations, _ in gpu_parity.ACTIVATIONS} == set(ActivationChoice)
    for is_cut in (False, True):
        chosen = [each for each in found if each.is_streamed and (each.cut_matrices is not None) is is_cut]
        streamed = [(each.activations, each.swaps_to_ssd) for each in chosen]
        assert sorted(streamed) == sorted(gpu_parity.ACTIVATIONS)


def test_shapes_are_those_of_qwen() -> None:
    millions = {"0.5B": 494.0, "1.5B": 1543.7, "3B": 3085.9, "7B": 7615.6}
    for name, shape in SHAPES.items():
        assert shape.num_params / 1e6 == pytest.approx(millions[name], abs=0.1)
        assert build_meta_model(model_config(shape, 1024), Precision.BF16).num_parameters() == shape.num_params


# --- predictions ---------------------------------------------------------------------------------------------------


def planned(name: str, *, gpu_gib: float, arena_gib: float, disk_gib: float) -> prediction.CasePlan:
    (case,) = (each for each in cases() if each.name == name)
    assert isinstance(case, SpeedCase)
    nbytes = [int(gib * GIB) for gib in (gpu_gib, arena_gib, disk_gib)]
    return prediction.Predictor(case, None).plan(prediction.Room.of(case, *nbytes))


@pytest.mark.long
def test_a_case_has_as_many_layers_as_there_is_room_for() -> None:
    whole = planned("speed-7B-host-16", gpu_gib=80, arena_gib=120, disk_gib=0)
    half = planned("speed-7B-host-16", gpu_gib=80, arena_gib=60, disk_gib=0)
    assert whole.case.shape.num_layers == 28
    assert 5 < half.case.shape.num_layers < 28
    assert half.predicted["arena_gib"] <= 60 - 3
    assert half.predicted["step_s"] < whole.predicted["step_s"]
    assert whole.predicted["gpu_gib"] <= 22.5
    assert set(whole.placement.host_blocks) == set(range(30))


@pytest.mark.long
def test_states_on_the_ssd_are_cut_by_the_disk() -> None:
    plan = planned("speed-3B-ssd-16", gpu_gib=24, arena_gib=64, disk_gib=30)
    assert 1 <= plan.case.shape.num_layers < 36
    assert plan.placement.host_blocks == ()
    assert plan.solution.bottleneck == "ssd"


@pytest.mark.long
def test_a_machine_without_room_has_no_case() -> None:
    with pytest.raises(prediction.NotHereError, match=r"no layer of 7B fits: there is room for 4\.0 GiB on the GPU"):
        planned("speed-7B-host-16", gpu_gib=4, arena_gib=120, disk_gib=0)


@pytest.mark.long
def test_all_of_the_gpus_memory_is_used_without_the_cap() -> None:
    plan = planned("speed-1.5B-host-16-all", gpu_gib=80, arena_gib=64, disk_gib=0)
    assert plan.choice is ActivationChoice.KEEP
    assert 22.5 < plan.predicted["gpu_gib"] <= 76


def link_result(**hardware: Any) -> Result:
    profile = {name: dict(part) for name, part in prediction._ASSUMED.items()} | hardware
    room = {"gpu_nbytes": 80 * GIB, "arena_nbytes": 120 * GIB, "disk_nbytes": 200 * GIB}
    measured = {"hardware": profile, "room": room, "num_cores": 16}
    return Result(case="link", part="link", status=Status.DONE, measured=measured)


@pytest.mark.long
def test_plans_made_elsewhere_are_simulated(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "check.jsonl")
    results.add(link_result())
    case = dataclasses.replace(tiny("speed-7B-host-16"), batch_size=4)  # type: ignore[type-var]
    assert isinstance(case, SpeedCase)
    prediction.main(tmp_path / "check.jsonl", tmp_path / "plans.json", lambda: [case])
    plan = json.loads((tmp_path / "plans.json").read_text())[case.name]
    assert plan["num_layers"] == case.shape.num_layers
    assert plan["step_s"] > 0


@pytest.mark.long
def test_a_prediction_is_written_down_before_the_case(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny("speed-7B-host-16")
    setting.results.add(link_result())
    setting.plan = {case.name: {"step_s": 7.0, "num_layers": 3}}

    def fail(_: Any) -> None:
        raise RuntimeError("CUDA is broken")

    monkeypatch.setattr(gpu_speed._Training, "run", fail)
    result = run_case(case, setting)
    assert (result.status, result.reason) == (Status.FAILED, "RuntimeError: CUDA is broken")
    assert result.predicted == {"step_s": 7.0, "num_layers": 3}
    predicted = (setting.root / "check.predicted.jsonl").read_text()
    assert json.loads(predicted) == {"case": case.name, "predicted": result.predicted}

    setting.plan[case.name]["num_layers"] = 2
    assert run_case(case, setting).reason == "the plan file has 2 layers, and 3 fit"


def test_the_link_is_measured_from_a_registered_arena(setting: Setting) -> None:
    found = gpu_link._link(setting)
    assert min(found.values()) > 0
    assert found.keys() >= {"h2d_gb_per_s", "d2h_gb_per_s", "duplex_gb_per_s", "register_s_per_gib", "launch_us"}
    assert "columns_of_2048_bytes_gb_per_s" in found
    assert list(Path("/dev/shm").glob(f"windlass-gpu-check-*-{os.getpid()}.arena")) == []


TWO = [torch.device("cpu", 0), torch.device("cpu", 1)]


def test_all_gpus_are_measured_and_a_cpu_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert gpu_link.devices_here("cuda") == [torch.device("cuda", i) for i in range(3)]
    assert gpu_link.devices_here("cpu") == [torch.device("cpu")]


def test_links_of_two_devices_copy_alone_and_at_once(setting: Setting) -> None:
    found = gpu_link.links_by_device(setting, TWO)
    assert [each["device"] for each in found["devices"]] == ["cpu:0", "cpu:1"]
    for rates in (found["together"], *(each[when] for each in found["devices"] for when in ("alone", "at_once"))):
        assert rates.keys() == {"h2d_gb_per_s", "d2h_gb_per_s", "duplex_gb_per_s"}
        assert min(rates.values()) > 0
    assert list(Path("/dev/shm").glob(f"windlass-gpu-check-*-{os.getpid()}.arena")) == []


def test_an_uplink_that_two_devices_share_shows(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for copies waits until all devices that are timed together copy. They share one uplink."""
    make_rates, copying = gpu_link._rates, threading.Barrier(1)

    def rates(links: Sequence[Any]) -> Any:
        nonlocal copying
        copying = threading.Barrier(len(links), timeout=30.0)
        return make_rates(links)

    def moved_s(link: Any, ways: Sequence[str]) -> float:
        copying.wait()
        return float(copying.parties * len(ways) * link.way_nbytes / 10e9)

    monkeypatch.setattr(gpu_link, "_rates", rates)
    monkeypatch.setattr(gpu_link._Link, "moved_s", moved_s)
    found = gpu_link.links_by_device(setting, TWO)

    assert found["together"]["h2d_gb_per_s"] == found["together"]["duplex_gb_per_s"] == pytest.approx(10)
    for each in found["devices"]:
        assert list(each["alone"].values()) == pytest.approx([10, 10, 10])
        assert list(each["at_once"].values()) == pytest.approx([5, 5, 5])
    rates_of_first = {f"{way}_gb_per_s": 10.0 for way in ("h2d", "d2h", "duplex")} | {"launch_us": 4.0}
    result = dataclasses.replace(link_result(), measured=link_result().measured | rates_of_first | {"by_device": found})
    cells = [line.split("|")[1:-1] for line in report_lines({"link": result}, cases(), Path(), "two")]
    rows = [[cell.strip() for cell in row] for row in cells]
    assert ["cpu:1", *["10.00"] * 3, *["5.00"] * 3] in rows
    assert ["all", *["20.00"] * 3, *["10.00"] * 3] in rows
    assert in_words(result) == "GB/s: h2d 10.0, d2h 10.0, duplex 10.0; 2 devices at once 10.0; a launch 4.0 us"


def test_a_gpu_that_others_use_does_not_cost_the_profile(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("GPU 1 is full")

    monkeypatch.setattr(gpu_link, "links_by_device", fail)
    assert gpu_link._by_device(setting, TWO[:1]) is None
    found = gpu_link._by_device(setting, TWO)
    assert found == {"reason": "OutOfMemoryError: GPU 1 is full"}
    result = dataclasses.replace(link_result(), measured=link_result().measured | {"by_device": found})
    lines = report_lines({"link": result}, cases(), Path(), "two")
    assert "The links of all GPUs were not measured: OutOfMemoryError: GPU 1 is full" in lines


# --- results -------------------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "check.jsonl")
    results.add(Result(case="link", part="link", status=Status.FAILED))
    results.add(Result(case="link", part="link", status=Status.DONE, took_s=2.0))
    with results.path.open("a") as file:
        file.write('{"case": "parity-bf16", "par')
    assert results.read() == {"link": Result(case="link", part="link", status=Status.DONE, took_s=2.0)}


def test_the_last_line_has_every_key_where_nothing_was_run() -> None:
    found = keys({}, cases())
    assert found.keys() >= ASKED_FOR
    assert {found[key] for key in ASKED_FOR} == {None}
    assert found["num_wrong"] == 0
    assert set(found["tokens_per_s"].values()) == {None}
    assert "".join(report_lines({}, cases(), Path(), "nothing")).startswith("# GPU check")


def speed_result(name: str, step_s: float, **measured: Any) -> Result:
    found = {
        "step_s": [step_s],
        "tokens_per_s": 1 / step_s,
        "compute_only_s": {"recompute": 1.0, "keep": None},
        "overlap_efficiency": 0.9,
        "gpu_peak_nbytes": None,
        "host_peak_nbytes": GIB,
        **measured,
    }
    return Result(case=name, part="speed", status=Status.DONE, measured=found)


def test_the_last_line_has_the_worst_of_each() -> None:
    results = [
        speed_result("speed-7B-host-16", 1.25, step_over_compute_only=1.25, host_waits=0, step_error=0.02),
        speed_result("speed-1.5B-ssd-16", 4.0, step_over_compute_only=1.1, host_waits=3, step_over_plain=1.5),
        speed_result("speed-1.5B-host-4", 2.0, step_over_compute_only=2.0, step_error=0.3),  # a small batch
        speed_result("speed-1.5B-ssd-16-as-zero_infinity", 10.0, step_over_compute_only=9.0),
        Result(case="deepspeed-zero_infinity", part="peers", status=Status.DONE, measured={"tokens_per_s": 0.125}),
    ]
    found = keys({result.case: result for result in results}, cases())
    assert {key: found[key] for key in ASKED_FOR} == {
        "step_over_compute_only": 1.25,
        "step_over_plain": 1.5,
        "reserved_over_planned": None,
        "host_waits": 3,
        "step_error_max": 0.3,
    }
    assert found["share_of_peak_min_from_batch_16"] == {"ssd": 0.25, "host": 0.8}
    assert found["over_deepspeed_zero_infinity"] == 2.0
    assert found["over_zero_infinity_schedule"] == 2.5
    assert found["over_deepspeed_zero_offload"] is found["over_zero_offload_schedule"] is None


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (
            InsufficientSpaceError("the arena", "/dev/shm", 2 << 30, 1 << 30, "enlarge it"),
            Status.LEFT_OUT,
            "InsufficientSpaceError: not enough room in shm for the arena: 2.00 GiB",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), Status.FAILED, "OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_a_case_fails_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: Status, reason: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(gpu_speed, "measure", fail)
    result = run_case(tiny("speed-7B-host-16"), setting)
    assert result.status is status
    assert result.reason.startswith(reason)
    assert setting.results.read() == {"speed-7B-host-16": result}
    assert reason in "\n".join(report_lines(setting.results.read(), cases(), Path(), "tiny"))


def test_a_peer_that_is_not_installed_is_left_out(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (peer, _) = (case for case in cases() if isinstance(case, PeerCase))
    result = run_case(peer, setting)
    assert (result.status, result.reason) == (Status.LEFT_OUT, "DeepSpeed is not installed")


def test_a_peer_that_fails_is_left_out(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ContenderFailedError("deepspeed-zero_offload ended with exit code 1: no compiler")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(gpu_peers, "run_contender", fail)
    (setting.root / "peers").mkdir()
    (*_, peer) = (case for case in cases() if isinstance(case, PeerCase))
    result = run_case(peer, setting)
    assert result.status is Status.LEFT_OUT
    assert result.reason == "deepspeed-zero_offload ended with exit code 1: no compiler"


@pytest.mark.long
def test_deepspeed_trains_where_it_is_installed(setting: Setting) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    in_memory, on_ssd = (run_case(case, setting) for case in cases(is_tiny=True) if isinstance(case, PeerCase))
    assert in_memory.status is on_ssd.status is Status.DONE, (in_memory.reason, on_ssd.reason)
    assert min(each.measured["tokens_per_s"] for each in (in_memory, on_ssd)) > 0
    assert in_memory.measured["losses"] == on_ssd.measured["losses"]


@pytest.mark.parametrize("name", ["speed-7B-host-16", "speed-1.5B-ssd-16"])
@pytest.mark.long
def test_a_case_ends_when_its_time_is_up(setting: Setting, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "_TRAINED_S", -1.0)  # the time is up as soon as weights are loaded
    result = run_case(tiny(name), setting)
    assert (result.status, result.reason) == (Status.LEFT_OUT, "no step was timed within -1 s")


@pytest.mark.long
def test_a_case_that_hangs_ends_with_a_line(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.is_tiny = False  # the tiny form is over too soon
    result = gpu_check._run_apart(ParityCase(Precision.BF16), setting, 1.0)
    assert result.status is Status.FAILED
    assert result.reason == "it was ended after 1 s, because it hung or took too long"


def plain_run(losses: list[float], param: float) -> gpu_parity.PlainRun:
    params = {"weight": torch.tensor([3.0, 4.0 + param])}
    return gpu_parity.PlainRun(
        losses=losses, validation_losses={}, params=params, grad_norms=[], loss_scales=[], skipped=[]
    )


@pytest.mark.parametrize(
    ("loss", "verdict"), [(1.0 + 7e-6, "equal"), (1.001, "DIFFERS"), (math.nan, "FAILED: RuntimeError: losses are not")]
)
def test_losses_that_differ_by_more_than_the_noise_are_wrong(
    setting: Setting, loss: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_plainly(_spec: Any, _device: str, *, is_reversed: bool = False) -> gpu_parity.PlainRun:
        return plain_run([1.0, 1.0 + 1e-6 * is_reversed], 1e-6 * is_reversed)

    variants = gpu_parity.variants(Precision.FP32, compiles=False)[:1]
    monkeypatch.setattr(gpu_parity, "variants", lambda precision, *, compiles: variants)
    monkeypatch.setattr(gpu_parity, "losses_of", lambda spec: [1.0, loss])
    monkeypatch.setattr(gpu_parity, "exported_params", lambda spec: plain_run([], 0.0).params)
    monkeypatch.setattr(gpu_parity, "train_plainly", train_plainly)
    result = run_case(ParityCase(Precision.FP32), setting)
    assert result.measured["num_wrong"] == (verdict != "equal")
    assert result.measured["floor"]["loss"] == pytest.approx(1e-6)
    assert f"| {verdict}" in "\n".join(report_lines(setting.results.read(), cases(), Path(), "tiny"))
    assert keys(setting.results.read(), cases())["num_wrong"] == result.measured["num_wrong"]


def test_params_that_differ_by_more_than_the_noise_are_wrong() -> None:
    floor = Differences(loss=1e-6, params=1e-6)
    assert Differences(loss=0.0, params=7e-6).is_within(floor, Precision.FP32)
    assert not Differences(loss=0.0, params=9e-6).is_within(floor, Precision.FP32)
    assert not Differences(loss=9e-6, params=0.0).is_within(floor, Precision.FP32)
    assert Differences(loss=0.0, params=9e-6).is_within(floor, Precision.BF16)  # two params, by one rounding each
    found = gpu_parity.differences_of([1.0], plain_run([], 0.05).params, plain_run([1.0], 0.0), Precision.FP32)
    assert found.params == pytest.approx(0.01, rel=1e-5)


@pytest.mark.long
def test_activations_that_should_be_swapped_and_are_not_are_wrong(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parity, "metrics_of", lambda spec, name: {1: 0})
    (variant, *_) = (
        each
        for each in gpu_parity.variants(Precision.FP32, compiles=False)
        if each.activations is ActivationChoice.SWAP
    )
    monkeypatch.setattr(gpu_parity, "variants", lambda precision, *, compiles: [variant])
    (run,) = run_case(ParityCase(Precision.FP32), setting).measured["runs"]
    assert run["is_wrong"]
    assert run["reason"] == "RuntimeError: 0 bytes of activations left the device, with the choice swap"


# --- waits of the host ------------------------------------------------------------------------------------------------


SYNCHRONIZED = "called a synchronizing CUDA operation"  # torch's message


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
            loss=None if phase is Phase.FORWARD else Loss(terms=(1.0,), num_targets=1, num_correct=0),
        )
        for op, phase in enumerate(phases)
    )
    return ComputeProgressed(job=job, step=Step(step), actor=GPU_WORKER, computed=operations, grads=())


def test_waits_of_the_host_are_counted_by_line_after_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with host_waits("cuda") as waits:
        for message in (
            computed(1, Phase.FORWARD, Phase.HEAD),
            computed(2, Phase.EVALUATE_HEAD),
            computed(2, Phase.FORWARD),
        ):
            gpu_parity.turn_on_after_second_step(waits, message)
        assert modes == []
        gpu_parity.turn_on_after_second_step(waits, computed(2, Phase.FORWARD, Phase.HEAD))
        assert modes == ["warn"]
        for text in (
            "called a synchronizing CUDA operation",
            "something else",
            "called a synchronizing CUDA operation",
        ):
            warnings.warn(text, stacklevel=1)
    assert modes == ["warn", "default"]
    assert waits.number == 2
    ((line, number),) = waits.by_line.items()
    assert re.fullmatch(r"tests/unit/benchmarks/gpu_check/test_gpu_check.py:\d+", line)
    assert number == 2


def test_a_cpu_has_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: pytest.fail("there is no GPU"))
    with host_waits("cpu") as waits:
        waits.turn(on=True)
    assert isinstance(waits, HostWaits)
    assert waits.number == 0
