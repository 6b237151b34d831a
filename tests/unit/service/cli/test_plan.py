"""`windlass plan`, as users run it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from rich.status import Status
from transformers import LlamaConfig

from tests.support.planner.pretend_measurement import pretend_to_measure
from tests.support.service.plan_command import JOB, SHAPE, run
from windlass.planner.answers import what_if
from windlass.planner.hardware.hardware import example_machines
from windlass.planner.planning.simulated_search import Watcher
from windlass.planner.question.choice_words import CHOICES_IN_WORDS
from windlass.planner.question.report import WhatIf
from windlass.service.api.schemas.plans import CreatePlan
from windlass.service.cli.plan.command import EXIT_DOES_NOT_FIT, _telling, plan
from windlass.service.cli.plan.inputs import config_of, hardware_of, is_id, shape_name
from windlass.service.cli.plan.printing import _job_wear
from windlass.service.installation.settings import HARDWARE_FILE, SETTINGS_FILE, load_settings
from windlass.service.processes import shutdown
from windlass.service.validation.hyperparameters import WindlassSettings

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 32}
SPLIT = ("--state-precision", "split")
BF16_SUMS = ("--accumulation-precision", "bf16")
AFTER_BACKWARD = ("--gradient-updates", "after_backward")


def test_a_plan_is_told_in_words(shape: Path, home: Path) -> None:
    result = run("--model", str(shape), "--hardware", "rtx4090-server", *JOB)
    assert result.exit_code == 0, result.output
    for words in ("step", "tokens a second", "peak of GPU memory", "busy: SSDs", "layers", "a step is bound by"):
        assert words in result.output
    for memory, limit in (("GPU memory", 24), ("host memory", 764), ("SSD space", 12 * 3576)):
        assert re.search(rf"^peak of {memory} +\d+\.\d\d of {limit}\.00 GiB$", result.output, re.MULTILINE)
    assert re.search(r"step +\S+ s; resources, and work that cannot overlap, take at least \S+ s\n", result.output)
    lines = [re.split("  +", line) for line in result.output.splitlines()]
    assert ["micro-batches", "1", "parts in which the batch of a step is computed"] in lines
    assert "recomputed: computed again in the backward pass" in result.output
    assert not any("_" in line[0].split()[0] for line in lines if len(line) > 1), "JSON's names are no words"


def test_each_choice_of_a_plan_is_told_in_words(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090", *JOB, "--num-microbatches", "1")
    found = json.loads(run(*job, "--json").output)
    assert [found[name] for name in ("num_steps", "job_s", "ssd_write_tb", "ssd_endurance_percent")] == [None] * 4
    assert "epochs" not in found["job_settings"]
    names = [name for name, value in found["choices"].items() if not isinstance(value, list)]
    assert names == list(CHOICES_IN_WORDS)
    text = (Path(__file__).parents[4] / "docs" / "planning.md").read_text()
    for name, words in CHOICES_IN_WORDS.items():
        assert f"| `{name}` | {words.label} | {words.meaning} |\n" in text


def test_plan_tells_the_time_of_a_whole_job_and_keeps_its_clip_norm(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090", *JOB, "--num-microbatches", "1", "--clip-norm", "0.5")
    found = json.loads(run(*job, "--num-examples", "1001", "--epochs", "2", "--json").output)
    assert (found["num_steps"], found["job_s"]) == (502, 502 * found["step_s"])
    assert found["ssd_write_tb"] == 502 * found["ssd_write_gb_per_step"] / 1000
    assert found["ssd_endurance_percent"] == pytest.approx(100 * found["ssd_write_tb"] / 1200)
    assert (found["job_settings"]["epochs"], found["job_settings"]["clip_norm"]) == (2, 0.5)
    told = run(*job, "--num-examples", "1001").output
    assert " for 753 steps, without loading and evaluations" in told
    assert " --set clip_norm=0.5\n" in told


@pytest.mark.parametrize(
    ("written_tb", "percent", "num_ssds", "told"),
    [
        (None, None, 2, []),
        (0.0125, None, 1, ["12.5 GB"]),
        (2381.0, None, 2, ["2381 TB, 1190 TB to each of 2 SSDs"]),
        (300.0, 50.0, 1, ["300 TB, 50% of the rated endurance"]),
        (300.0, 25.0, 2, ["300 TB, 150 TB to each of 2 SSDs, 25% of the least rated endurance"]),
    ],
)
def test_wear_of_a_whole_job_is_told_for_each_ssd(
    written_tb: float | None, percent: float | None, num_ssds: int, told: list[str]
) -> None:
    assert [words for _, words in _job_wear(written_tb, percent, num_ssds)] == told


def test_endurance_of_this_installation_counts_for_this_machine_only(shape: Path, home: Path) -> None:
    home.mkdir()
    machine = example_machines()["rtx4090-server"]
    (home / HARDWARE_FILE).write_text(machine.read_text())
    (home / SETTINGS_FILE).write_text("ssd_endurance_tbw = 600\n")
    job = ("--model", str(shape), *JOB, "--num-microbatches", "1", "--num-examples", "1001")
    here, there = (run(*job, "--hardware", name).output for name in ("measured", "rtx4090-server"))
    assert re.search(
        r"the whole job writes +\S+ [GT]B, \S+ [GT]B to each of 12 SSDs, \S+% of the least rated endurance\n", here
    )
    assert "the whole job writes" in there
    assert "endurance" not in there


def test_limits_of_the_command_are_those_of_the_api() -> None:
    options = {
        name: get_args(hint)[1] for name, hint in get_type_hints(plan, include_extras=True).items() if get_args(hint)
    }
    ranges = {name: (option.min, option.max) for name, option in options.items()}
    described = CreatePlan.model_json_schema()
    of_body, of_settings = described["properties"], described["$defs"]["WindlassSettings"]["properties"]

    def range_of(field: dict[str, Any]) -> tuple[int, int]:
        (number,) = (each for each in field.get("anyOf", [field]) if each["type"] == "integer")
        return number["minimum"], number["maximum"]

    for name in ("batch_size", "num_examples", "num_validation_examples"):
        assert ranges[name] == range_of(of_body[name]), name
    for name, field in (("seq_len", "sequence_length"), ("epochs", "epochs")):
        assert ranges[name] == range_of(of_settings[field]), name


@pytest.mark.parametrize("clip_norm", ["high", "0"])
def test_exit_code_is_that_of_wrong_options_whatever_refuses_them(shape: Path, home: Path, clip_norm: str) -> None:
    assert run("--model", str(shape), "--hardware", "rtx4090", *JOB, "--clip-norm", clip_norm).exit_code == 2


@pytest.mark.parametrize("option", ["--num-microbatches", "--lanes", "--gpus"])
def test_plan_with_more_parts_than_a_request_may_have_is_refused(shape: Path, home: Path, option: str) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090", "--batch-size", "9000", "--seq-len", "64")
    result = run(*job, option, "5000")
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {option}: ")


@pytest.mark.parametrize(("measures", "is_terminal"), [(False, True), (True, True), (False, False)])
def test_progress_of_what_if_is_shown_on_a_terminal(
    shape: Path, home: Path, monkeypatch: pytest.MonkeyPatch, *, measures: bool, is_terminal: bool
) -> None:
    def with_what_if(_question: object, planned: Any, watcher: Watcher, *, tell: Any) -> Any:
        if measures:
            watcher.see_measurement("blocks", 0, 2)
        else:
            row = WhatIf(key="ram", change="more RAM", feasible=True, step_s=1.0, tokens_per_s=1.0, gain=0.5)
            tell(replace(planned, report=replace(planned.report, what_if=(row,))), 6)
        return planned

    monkeypatch.setattr(what_if, "with_what_if", with_what_if)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("--model", str(shape), "--hardware", "rtx4090", *JOB, "--num-microbatches", "1", "--what-if")
    assert (
        ("measuring blocks" if measures else "changed; most so far: more RAM, +50%") in result.stderr
    ) is is_terminal
    assert result.stdout.startswith("step ")


def test_a_plan_is_told_as_json(shape: Path, home: Path) -> None:
    result = run("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--json")
    found = json.loads(result.output)
    keys = {
        "feasible",
        "step_s",
        "bound_s",
        "tokens_per_s",
        "tflops",
        "bottleneck",
        "peak_gib",
        "ssd_write_gb_per_step",
    }
    assert keys | {"choices", "reasons"} <= set(found)
    assert set(found["peak_gib"]) == {"gpu", "host", "ssd"}


def test_plan_of_a_job_with_a_cut_has_it(shape: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--num-microbatches", "1")
    assert "--set cut_matrices=1048576\n" in run(*job, "--cut-matrices", "1048576").output
    found = json.loads(run(*job, "--json").output)
    assert found["choices"]["cut_matrices"] is None
    assert found["job_settings"]["cut_matrices"] == "auto"


@pytest.mark.long
def test_plan_shows_the_cut_that_a_job_gets() -> None:
    job = ("--model", "llama-3.1-405b", "--hardware", "rtx4090-server", "--batch-size", "8", "--seq-len", "1024")
    found = json.loads(run(*job, "--json").output)
    cut = found["choices"]["cut_matrices"]
    assert cut >= 2**24
    assert f"in pieces of at most {2**24} elements (cut_matrices)" in found["least_gpu_reason"]
    asked = WindlassSettings.model_validate(found["job_settings"])
    assert asked.cut_matrices == cut
    assert f"--set cut_matrices={cut}\n" in run(*job).output
    off = json.loads(run(*job, "--cut-matrices", "off", "--json").output)
    assert off["least_gpu_gib"] > found["least_gpu_gib"] + 3
    assert off["job_settings"] is None or off["job_settings"]["cut_matrices"] == "off"
    assert off["step_s"] is None or off["step_s"] > found["step_s"]
    fixed = json.loads(run(*job, "--cut-matrices", str(cut), "--json").output)
    assert fixed["choices"]["cut_matrices"] == cut
    assert fixed["step_s"] <= 1.01 * found["step_s"]


def test_the_settings_of_this_installation_count_for_this_machine_only(shape: Path, home: Path) -> None:
    home.mkdir()
    machine = example_machines()["rtx4090-server"]
    (home / HARDWARE_FILE).write_text(machine.read_text())
    (home / SETTINGS_FILE).write_text("host_memory_gib = 2\ngpu_memory_gib = 1\n")
    job = ("--model", str(shape), *JOB, "--json")
    here = json.loads(run(*job).output)
    assert (here["limit_gib"]["host"], here["limit_gib"]["gpu"]) == (2.0, 1.0)
    there = json.loads(run(*job, "--hardware", str(machine)).output)
    assert there["limit_gib"]["host"] > 700
    assert there["limit_gib"]["gpu"] > 20


def test_peaks_of_memory_stand_beside_the_budgets_of_this_installation(shape: Path, home: Path) -> None:
    """A budget is of what the job allocates. Its processes, and the GPU's driver, take 1.5 GiB more."""
    home.mkdir()
    (home / HARDWARE_FILE).write_text(example_machines()["rtx4090-server"].read_text())
    (home / SETTINGS_FILE).write_text("host_memory_gib = 2\ngpu_memory_gib = 1\n")
    told = run("--model", str(shape), *JOB, "--num-microbatches", "1").output
    for memory, limit in (("GPU memory", 1 + 1.5), ("host memory", 2 + 1.5)):
        assert re.search(rf"^peak of {memory} +\d+\.\d\d of {limit:.2f} GiB$", told, re.MULTILINE)


def test_a_job_can_be_submitted_as_planned(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090-server", *JOB)
    result = run(*job, "--precision", "fp16", "--optimizer", "adam", "--no-clip", "--num-microbatches", "2")
    options = "--set batch_size=4 --set num_microbatches=2 --set sequence_length=64 --set clip_norm=null"
    options += " --set optimizer=adam --set precision=fp16"
    assert f"a job as planned: windlass submit MODEL FILE {options}" in result.output
    found = json.loads(run(*job, "--json").output)
    asked = WindlassSettings.model_validate(found["job_settings"])
    assert asked.num_microbatches == found["choices"]["num_microbatches"]
    assert asked.clip_norm == WindlassSettings().clip_norm
    with_adam = json.loads(run(*job, "--optimizer", "adam", "--json").output)
    assert with_adam.pop("job_settings") == {**found.pop("job_settings"), "optimizer": "adam"}
    assert with_adam == found, "both take the same"


@pytest.mark.long
def test_order_of_updates_is_printed_only_where_a_job_could_get_another(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--gradient-updates", "kept")
    assert "--set sequence_length=64\n" in run(*job).output
    assert "--set gradient_updates=kept\n" in run(*job, "--no-clip").output


def test_blocks_are_measured_once_and_again_if_no_job_trains_here_any_more(
    shape: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(Status, "update", lambda _, text: told.append(text))
    measured = pretend_to_measure(monkeypatch)
    monkeypatch.setattr(torch, "set_num_threads", lambda _number: None)
    home.mkdir()
    machine = example_machines()["rtx4090-server"].read_text()
    (home / HARDWARE_FILE).write_text(machine.replace("count: 1,", "count: 0,"))
    for is_alone, number in ((False, 1), (False, 1), (True, 2), (True, 2), (False, 2)):
        monkeypatch.setattr(shutdown, "is_box_free", lambda _settings, is_alone=is_alone: is_alone)
        num_before = len(measured)
        told.clear()
        result = run("--model", str(shape), *JOB, "--num-microbatches", "1", "--hardware", "measured")
        assert result.exit_code == 0, result.output
        assert len(measured) == number
        if number > num_before:
            by_rates, measuring, by_blocks = told
            assert re.fullmatch(r"planning: about \S+ s a step by the machine's rates", by_rates)
            assert re.fullmatch(r"about .*; measuring the model's blocks with 4 examples .* \(1 of 1\)", measuring)
            assert re.fullmatch(r"planning: at least \S+ s a step", by_blocks)


def test_measurement_before_which_nothing_was_estimated_is_told_with_what_goes_on() -> None:
    told = list[str]()
    _telling(told.append).see_measurement("blocks", 0, 2)
    assert told == ["planning; measuring blocks (1 of 2)"]


def test_only_a_model_of_the_models_directory_can_be_submitted_by_its_name(home: Path, shape: Path) -> None:
    folder = home / "models" / "org" / "small"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    settings = load_settings()
    assert [is_id(settings, name) for name in ("org/small", "small", str(folder), str(shape))] == [True, *[False] * 3]


@pytest.mark.long
def test_plan_with_settings_of_gradients_is_of_a_job_with_the_same(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--num-microbatches", "2")
    found = json.loads(run(*job, *AFTER_BACKWARD, *BF16_SUMS, "--json").output)
    asked = WindlassSettings.model_validate(found["job_settings"])
    assert (asked.gradient_updates, asked.accumulation_precision) == ("after_backward", "bf16")


@pytest.mark.long
def test_plan_with_lanes_has_a_micro_batch_for_each(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--lanes", "3")
    assert " --set num_microbatches=3 --set sequence_length=64 --set lanes=3" in run(*job).output


def test_plan_of_several_gpus_has_a_micro_batch_for_each(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "a100-40g-server", *JOB, "--gpus", "3")
    result = run(*job)
    assert result.exit_code == 0, result.output
    assert " --set num_microbatches=3 --set sequence_length=64 --set gpus=3\n" in result.output
    assert " --set lanes=2 --set gpus=3\n" in run(*job, "--lanes", "2").output


@pytest.mark.long
def test_chosen_number_of_microbatches_is_told_to_follow_from_the_data_of_a_job(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090-server", "--batch-size", "8", "--seq-len", "64")
    result = run(*job)
    assert re.search(r"--set num_microbatches=\d+ ", result.output)
    assert "a job that names no number of micro-batches gets the fastest one" in result.output
    assert "that names no number" not in run(*job, "--num-microbatches", "1").output


@pytest.mark.long
def test_other_systems_are_told_beside_the_plan(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--compare")
    result = run(*job)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    (start,) = (index for index, line in enumerate(lines) if line.startswith("system "))
    assert lines[start + 1].startswith("windlass ")
    assert any(line.startswith("ZeRO-Infinity ") and line.endswith("yes") for line in lines[start:])
    found = json.loads(run(*job, "--json").output)
    systems = {each["system"]: each for each in found["compare"]["systems"]}
    assert {"ZeRO-Infinity", "G10", "Ratel"} <= set(systems)
    assert {"step_s", "gpu_share", "tokens_per_s", "bottleneck", "fits", "missing_gib"} <= set(systems["Ratel"])


def test_what_if_is_told_as_a_table(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "rtx4090:ssds=2", *JOB, "--num-microbatches", "1")
    lines = run(*job, "--what-if").output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("what if "))
    assert lines[start + 1].startswith("as it is ")
    rows = {re.split("  +", line)[0]: re.split("  +", line)[1:] for line in lines[start + 2 : start + 9]}
    more_ssds = "one more SSD, 3 in all"
    assert set(rows) == {
        more_ssds,
        "64 GiB more RAM",
        "the next card, NVIDIA GeForce RTX 5090",
        "a batch twice as large, 8",
        "without gradient clipping (clip_norm: null, gradient_updates: auto): large gradients are not limited",
        "states in less space (state_precision: split), with the same results",
        "states in bf16 (state_precision), which is less exact",
    }
    assert rows[more_ssds][-1].endswith("%")


def test_plan_that_does_not_fit_exits_with_a_code_of_its_own(shape: Path, home: Path, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.yaml"
    text = example_machines()["rtx4090-server"].read_text()
    tiny.write_text(text.replace("memory_gib: 764", "memory_gib: 1.6"))
    shape.write_text(SHAPE.replace("256", "2048"))
    result = run("--model", str(shape), "--hardware", str(tiny), *JOB)
    assert result.exit_code == EXIT_DOES_NOT_FIT == 3
    assert "it does not fit" in result.output
    assert "it fits with" in result.output
    least = (
        r"the least GPU memory for this job is \S+ GiB: with num_microbatches=\d, (one|\d) micro-batch(es)? at a time"
    )
    assert re.search(least, result.output)


def test_a_models_folder_has_a_plan(home: Path, tmp_path: Path) -> None:
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")
    result = run("--model", str(tmp_path / "model"), "--hardware", "rtx4090-server", *JOB)
    assert result.exit_code == 0, result.output


def test_a_published_model_has_a_plan_without_its_files(home: Path) -> None:
    job = ("--model", "qwen2.5-0.5b", "--hardware", "rtx4090:ram=128,ssds=2", *JOB)
    result = run(*job, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["shape"], found["choices"]["activations"][0]["layers"]) == ("qwen2.5-0.5b", "0-23")
    assert "takes at most 32768 tokens" in run(*job[:-1], "40000").output


def test_plan_by_a_name_on_the_hub_tells_the_shape(home: Path) -> None:
    job = ("--hardware", "rtx4090:ram=128,ssds=2", *JOB, "--num-microbatches", "1")
    told = run("--model", "Qwen/Qwen2.5-0.5B-Instruct", *job).output
    assert told.startswith("the model has the published shape qwen2.5-0.5b of Qwen\nstep ")
    assert "published shape" not in run("--model", "qwen2.5-0.5b", *job).output


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_a_model_that_is_here_goes_before_the_published_one(home: Path, name: str) -> None:
    settings = load_settings()
    assert config_of(settings, name, 64).load().num_hidden_layers == 24
    assert shape_name(settings, name) == "qwen2.5-0.5b"
    folder = home / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 3, "max_position_embeddings": 64}))
    assert config_of(settings, name, 64).load().num_hidden_layers == 3
    assert shape_name(settings, name) is None


# Arguments, and words of the error about something that is not there or cannot be used.
NOT_THERE = [
    (("--model", "nothing-here", "--hardware", "rtx4090-server"), "there is no model nothing-here, neither"),
    (("--model", "llama-3.1-71b", "--hardware", "rtx4090-server"), "did you mean llama-3.1-70b"),
    (("--model", "mistralai/Mistral-7B-v0.1", "--hardware", "rtx4090-server"), "did you mean mistral-7b"),
    (("--model", "../etc", "--hardware", "rtx4090-server"), "--model: there is no folder ../etc with a config.json"),
    (("--model", "{shape}", "--hardware", "no-such-machine"), "no machine is named no-such-machine; there are"),
    (("--model", "{shape}", "--hardware", "rtx4080"), "did you mean rtx4090"),
    (("--model", "gemma-2-9b", "--hardware", "rtx4090"), "are known; they are gpt2, gpt2-medium, "),
    (("--model", "meta-lama/Llama-3.1-8B", "--hardware", "rtx4090"), "did you mean meta-llama/Llama-3.1-8B? Else"),
    (("--model", "{shape}"), "windlass doctor"),
    (("--model", "/nofile.yaml", "--hardware", "rtx4090"), "error: --model: there is no file /nofile.yaml"),
    (("--model", "{shape}", "--hardware", "{folder}"), "folder is a folder; name a YAML file"),
    (("--model", "{shape}", "--hardware", "rtx4080:gpus=2"), "no machine is named rtx4080"),
    (("--model", "{shape}", "--hardware", "{shape}/.."), "shape.yaml/.."),
    (("--model", "{folder}", "--hardware", "rtx4090-server"), "config of folder cannot be used"),
]
# Arguments, and words of the error about an option that is wrong.
WRONG = [
    (("--model", "{shape}", "--hardware", "RTX 4090:ram=8"), "error: --hardware: RTX 4090:ram=8: ram=8 is not"),
    (("--model", "{shape}", "--hardware", "rtx4090:gpus=3"), "error: --hardware: rtx4090:gpus=3: gpus=3 is not"),
    (("--model", "{shape}", "--hardware", "rtx4090:ram=96gi"), "--hardware: rtx4090:ram=96gi: ram=96gi is not"),
    (("--model", "{shape}", "--hardware", "2x rtx4090:gpus=2"), "gpus is given twice"),
    (("--model", "{shape}", "--hardware", ""), "error: --hardware: the name is empty"),
    (("--model", "", "--hardware", "rtx4090"), "error: --model: the name is empty"),
    (("--model", "{shape}", "--hardware", "{cpu}", "--find", "smallest-gpu"), "needs a machine with a GPU"),
    (("--model", "{shape}", "--hardware", "rtx4090-server", "--num-microbatches", "9"), "9 parts of a batch of 4"),
    (("--model", "{shape}", "--hardware", "rtx4090-server", "--lanes", "5"), "5 lanes of at most 4 micro-batches"),
    (
        ("--model", "{shape}", "--hardware", "rtx4090-server", "--lanes", "2", "--accumulation-precision", "bf16"),
        "--lanes: lanes is 2, but lanes are summed in fp32",
    ),
    (
        ("--model", "{shape}", "--hardware", "memascend-1", "--gpus", "3"),
        "--gpus: 3, and the machine",
    ),
    (("--model", "{shape}", "--hardware", "a100-40g-server", "--gpus", "5"), "5 GPUs for at most 4 micro-batches"),
    (("--model", "{shape}", "--hardware", "rtx4090-server", "--precision", "fp32", *SPLIT), "--state-precision: "),
    (
        ("--model", "{shape}", "--hardware", "rtx4090-server", "--precision", "fp16", *BF16_SUMS),
        "--accumulation-precision: must be fp32 or the model's own precision",
    ),
    (("--model", "{shape}", "--hardware", "rtx4090-server", "--gradient-updates", "naive"), "add --no-clip"),
    (
        ("--model", "{shape}", "--hardware", "rtx4090-server", "--cut-matrices", "1000"),
        '--cut-matrices: must be "auto", "off" or a whole number of elements from 1048576 to ',
    ),
    (
        ("--model", "{shape}", "--hardware", "rtx4090-server", "--cut-matrices", "fine"),
        '--cut-matrices: must be "a',
    ),
    (
        ("--model", "{shape}", "--hardware", "rtx4090-server", "--gradient-updates", "lazy"),
        "not one of auto, active",
    ),
    (("--model", "{shape}", "--hardware", "rtx4090", "--what-if", "--find", "fewest-ssds"), "--what-if: a search"),
    (("--model", "{short}", "--hardware", "rtx4090-server"), "--seq-len: 64: the model in"),
    (
        ("--model", "{shape}", "--hardware", "rtx4090", "--no-clip", "--clip-norm", "2"),
        "--clip-norm: gradients are",
    ),
    (("--model", "{shape}", "--hardware", "rtx4090", "--clip-norm", "0"), "--clip-norm: "),
    (
        ("--model", "{shape}", "--hardware", "rtx4090", "--slack", "0.1"),
        "--slack: it goes with --find fewest-ssds or",
    ),
    (("--model", "{shape}", "--hardware", "rtx4090", "--slack", "0", "--find", "most-layers"), "--slack: it goes with"),
]


@pytest.mark.parametrize(
    ("arguments", "words", "code"), [*((*each, 1) for each in NOT_THERE), *((*each, 2) for each in WRONG)]
)
def test_bad_input_gets_one_line(arguments: tuple[str, ...], words: str, code: int, shape: Path, home: Path) -> None:
    names = {each: shape.parent / each for each in ("folder", "short", "cpu")} | {"shape": shape}
    names["cpu"].write_text(
        example_machines()["rtx4090-server"].read_text().replace("gpus: {count: 1", "gpus: {count: 0")
    )
    for name, config in (("folder", {"model_type": "none of any library"}), ("short", LLAMA)):
        names[name].mkdir()
        (names[name] / "config.json").write_text(json.dumps(config))
    result = run(*(each.format(**names) for each in arguments), *JOB)
    assert result.exit_code == code
    assert "Value error" not in result.output
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_bad_files_are_told_with_option_file_key_and_value(shape: Path, home: Path) -> None:
    shape.write_text(SHAPE.replace("num_heads: 4", "num_heads: -3\nheads: 4"))
    result = run("--model", str(shape), "--hardware", "rtx4090-server", *JOB)
    assert result.exit_code == 1
    first, second = result.output.splitlines()
    assert first.startswith(f"error: --model: {shape}: num_heads: -3")
    assert second.startswith(f"--model: {shape}: heads: is not a key here; did you mean num_heads?")
    result = run("--model", "gpt2", "--hardware", str(shape), *JOB)
    assert result.exit_code == 1
    assert f"error: --hardware: {shape}: gpus: is missing\n--hardware: {shape}: " in result.output


@pytest.mark.long
def test_simulated_steps_leave_a_trace(shape: Path, home: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = run("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--trace", str(trace))
    assert result.exit_code == 0, result.output
    found = json.loads(trace.read_text())
    kinds = {event["name"].split()[0] for event in found["traceEvents"] if event["ph"] == "X"}
    assert kinds >= {"forward", "backward"}
    names = {event["pid"]: event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"}
    most = dict.fromkeys(("gpu memory", "host memory", "ssd memory"), 0)
    for event in found["traceEvents"]:
        if event["ph"] == "C" and event["name"] == "all":
            most[names[event["pid"]]] = max(most[names[event["pid"]]], event["args"]["used"])
    assert most == {f"{tier} memory": each["peak_nbytes"] for tier, each in found["otherData"]["memory"].items()}
    assert min(most.values()) > 0
    result = run("--model", str(shape), "--hardware", "rtx4090-server", *JOB, "--trace", "/nowhere/trace.json")
    assert result.exit_code == 1
    assert "/nowhere/trace.json cannot be written" in result.output


def test_machine_with_a_name_of_its_own_goes_before_a_listed_one_in_other_writing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert hardware_of(settings, "RTX4090") == hardware_of(settings, "rtx4090")
    for name in ("RTX4090", "rtx4090"):
        (tmp_path / name).write_text(example_machines()["memascend-1"].read_text())
    assert hardware_of(settings, "RTX4090") == hardware_of(settings, "memascend-1")
    assert hardware_of(settings, "rtx4090") != hardware_of(settings, "memascend-1")


def test_plan_that_chooses_gpus_says_what_others_would_give(shape: Path, home: Path) -> None:
    job = ("--model", str(shape), "--hardware", "a100-40g-server", *JOB)
    output = run(*job, "--gpus", "auto", "--num-microbatches", "2").output
    assert re.search(r"^(one GPU, because more would hardly be faster|2 GPUs: [\d.]+x of one)", output, re.MULTILINE)
    assert " --set gpus=auto\n" in output
    assert " --set lanes=" not in output
    assert "a search (--find) is for a number of GPUs" in run(*job, "--gpus", "auto", "--find", "largest-batch").output
    assert "'all' is neither a number nor auto" in run(*job, "--gpus", "all").output


@pytest.mark.parametrize(
    "numbers",
    [
        ("--batch-size", "0", "--seq-len", "64"),
        ("--batch-size", "4", "--seq-len", "1e9"),
        (*JOB, "--find", "fewest-ssds", "--slack", "nan"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers: tuple[str, ...], shape: Path, home: Path) -> None:
    result = run("--model", str(shape), "--hardware", "rtx4090-server", *numbers)
    assert result.exit_code == 2
    assert "Invalid value for" in result.output
