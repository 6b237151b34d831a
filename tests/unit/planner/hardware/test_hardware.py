"""Hardware profiles: accepted values, refused values and warnings."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from windlass.planner.hardware.hardware import Hardware, example_machines, save_hardware, unusual
from windlass.planner.hardware.yaml_files import YamlFileError, load, parse


def profile() -> dict[str, Any]:
    return {
        "gpus": {"count": 1, "memory_gib": 24, "tflops": 150},
        "host": {"memory_gib": 128, "memory_gb_per_s": 60, "adam_params_per_s": 2e9},
        "pcie": {"h2d_gb_per_s": 24, "d2h_gb_per_s": 24},
        "ssds": {"count": 2, "read_gb_per_s": 6, "write_gb_per_s": 4, "capacity_gib": 1800},
    }


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    hardware = parse(Hardware, profile(), "here")
    save_hardware(hardware, tmp_path / "machine.yaml")
    assert load(Hardware, tmp_path / "machine.yaml") == hardware
    assert hardware.ssds.combined_gb_per_s is None
    assert hardware.network_gb_per_s is None


@pytest.mark.parametrize("name", sorted(example_machines()))
def test_the_examples_are_usual_machines(name: str) -> None:
    hardware = load(Hardware, example_machines()[name])
    assert unusual(hardware) == []
    assert hardware.gpus.name


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("gpus.tflops", 0, "greater than 0"),
        ("gpus.tflops", -3, "greater than 0"),
        ("gpus.tflops", "fast", "valid number"),
        ("gpus.tflops", float("nan"), "finite"),
        ("gpus.tflops", float("inf"), "finite"),
        ("gpus.count", -1, "greater than or equal to 0"),
        ("gpus.count", 1.5, "integer"),
        ("gpus.count", True, "integer"),
        ("gpus.memory_gib", True, "number"),
        ("gpus", [], "a mapping with count, memory_gib, tflops is needed"),
        ("gpus.tflops", "5.0e9", "to YAML this is text: write it without quotes"),
        ("gpus.tflops", 1e300, "less than or equal to 1000000000000000"),
        ("gpus.tflops", 1e-300, "at least 1e-06"),
        ("ssds.count", 10**9, "less than or equal to 10000"),
        ("ssds.count", 0, "greater than or equal to 1"),
        ("ssds.combined_gb_per_s", 0, "greater than 0"),
        ("pcie.duplex_gb_per_s", 0, "greater than 0"),
        ("network_gb_per_s", -1, "greater than 0"),
    ],
)
def test_a_wrong_value_is_named_with_file_key_and_value(tmp_path: Path, key: str, value: Any, said: str) -> None:
    found = profile()
    *parts, last = key.split(".")
    part = found
    for each in parts:
        part = part[each]
    part[last] = value
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(found))
    with pytest.raises(YamlFileError) as caught:
        load(Hardware, path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: {key}: {value!r}: ")
    assert said in line


def test_all_problems_are_told_at_once() -> None:
    found = profile()
    del found["pcie"]["d2h_gb_per_s"]
    found["host"]["memory_gb"] = 3
    found["gpus"]["tflops"] = 0
    with pytest.raises(YamlFileError) as caught:
        parse(Hardware, found, "machine.yaml")
    assert sorted(str(caught.value).splitlines()) == [
        "machine.yaml: gpus.tflops: 0: input should be greater than 0",
        "machine.yaml: host.memory_gb: is not a key here; did you mean memory_gib?",
        "machine.yaml: pcie.d2h_gb_per_s: is missing",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "gpus: {}\ngpus: {}",
        "gpus: {count: 1, count: 2}",
        "",
        "- 1",
        "gpus: [",
        "\t",
        "gpus",
        "gpus: 2026-13-45",
        "[" * 5000,
        "!!python/object/apply:os.system [ls]",
    ],
)
def test_profile_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(YamlFileError, match=r"machine\.yaml: "):
        load(Hardware, path)


def test_profile_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(YamlFileError, match="cannot be read"):
        load(Hardware, tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(YamlFileError, match="cannot be read"):
        load(Hardware, tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("host.memory_gib", 128 * 2**30, "GiB are 2^30 bytes, or were bytes meant?"),
        ("host.memory_gib", 128 * 2**10, "or were MiB meant?"),
        ("ssds.capacity_gib", 0.9, "GiB are 2^30 bytes, or were TiB meant?"),
        ("ssds.read_gb_per_s", 6000, "GB are 10^9 bytes, not bits, or were MB/s meant?"),
        ("gpus.tflops", 1.5e14, "or were FLOPS meant?"),
        ("pcie.h2d_gb_per_s", 0.02, "less than any machine has"),
        ("host.adam_params_per_s", 2.0, "parameters"),
    ],
)
def test_a_unit_that_is_probably_wrong_is_doubted_and_taken(key: str, value: float, said: str) -> None:
    found = profile()
    part, name = key.split(".")
    found[part][name] = value
    (warning,) = unusual(parse(Hardware, found, "machine.yaml"))
    assert warning.startswith(f"{key}: {value:g} ")
    assert said in warning


def test_a_key_that_is_given_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(profile()) + "gpus: {}\n")
    with pytest.raises(YamlFileError, match="gpus is given twice"):
        load(Hardware, path)
