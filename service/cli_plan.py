"""The command `plan`: what a job would take on a machine, before anything runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.planner.hardware import Hardware, example_machines, unusual
from windlass.planner.shapes import ModelShape
from windlass.planner.yaml_files import load
from windlass.service.cli_errors import CommandError
from windlass.service.cli_table import print_columns
from windlass.service.doctor import HARDWARE_FILE
from windlass.service.errors import ApiError
from windlass.service.model_ids import model_dir
from windlass.service.settings import Settings, load_settings
from windlass.storage.ids import Precision, StatePrecision

if TYPE_CHECKING:
    from windlass.planner.report import PlanReport

_MEASURED = "measured"


def plan(
    model: Annotated[str, typer.Option(help="A model's folder or name, or a YAML file with a shape's numbers.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a step.")],
    seq_len: Annotated[int, typer.Option(min=8, help="Tokens of an example.")],
    hardware: Annotated[
        str, typer.Option(help="A YAML file, the name of a published machine, or 'measured': what `doctor` saved.")
    ] = _MEASURED,
    num_microbatches: Annotated[
        int | None, typer.Option(min=1, help="Parts a step is computed in (default: what is fastest).")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of the model.")] = Precision.BF16,
    state_precision: Annotated[StatePrecision, typer.Option(help="Of the optimizer's states.")] = StatePrecision.FP32,
    clip: Annotated[bool, typer.Option(help="Clip the gradient's norm.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    home: Annotated[Path | None, typer.Option(help="The home directory; else WINDLASS_HOME, else ~/.windlass.")] = None,
) -> None:
    """Tell whether a job fits a machine, how long a step takes, what bounds it, what to change. Exit code 2 if not."""
    settings = load_settings(home)
    machine = _hardware(settings, hardware)
    if num_microbatches is not None and num_microbatches > batch_size:
        raise CommandError(
            f"--num-microbatches: {num_microbatches} parts of a batch of {batch_size}; each has at least one example"
        )
    found = _answer(
        settings,
        model,
        hardware=machine,
        batch_size=batch_size,
        sequence_length=seq_len,
        num_microbatches=num_microbatches,
        precision=precision,
        state_precision=state_precision,
        clips=clip,
        measures=hardware == _MEASURED,
    )
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        for warning in unusual(machine):
            print(f"! {warning}")
        _print(found)
    if not found.feasible:
        raise typer.Exit(2)


def _hardware(settings: Settings, name: str) -> Hardware:
    if name == _MEASURED:
        path = settings.home / HARDWARE_FILE
        if not path.exists():
            raise CommandError(f"--hardware: nothing was measured yet; run `windlass doctor`, which writes {path}")
        return load(Hardware, path)
    examples = example_machines()
    if name not in examples and not Path(name).exists():
        raise CommandError(
            f"--hardware: there is no file {name}, and no published machine of that name; there are "
            f"{', '.join(sorted(examples))}, and '{_MEASURED}'"
        )
    return load(Hardware, examples.get(name, Path(name)))


def _answer(settings: Settings, model: str, *, sequence_length: int, **question: Any) -> "PlanReport":
    from windlass.actors.planning import PlanQuestion, answer
    from windlass.engine.model_profile import config_of_shape
    from windlass.engine.partition import UnsupportedArchitectureError, load_config

    if model.endswith((".yaml", ".yml")):
        config = config_of_shape(load(ModelShape, Path(model)), num_tokens=sequence_length)
    else:
        folder = Path(model)
        if not (folder / "config.json").exists():
            try:
                folder = model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
            except ApiError as error:
                raise CommandError(f"--model: {error}") from None
        if not (folder / "config.json").exists():
            raise CommandError(
                f"--model: there is no model in {folder}; name a folder with a config.json, or a YAML file with "
                f"{', '.join(ModelShape.model_fields)}"
            )
        config = load_config(str(folder))
    try:
        return answer(PlanQuestion(config=config, sequence_length=sequence_length, **question)).report
    except UnsupportedArchitectureError as error:
        raise CommandError(f"--model: {error}") from None


def _print(found: "PlanReport") -> None:
    if not found.feasible:
        print("it does not fit:")
        for reason in found.reasons:
            print(f"  {reason}")
        return
    numbers = asdict(found)
    print_columns(
        [
            ("step", f"{numbers['step_s']:.3g} s"),
            ("tokens a second", f"{numbers['tokens_per_s']:.4g}"),
            ("model's TFLOPS", f"{numbers['tflops']:.4g}"),
            ("written to SSDs a step", f"{numbers['ssd_write_gb_per_step']:.4g} GB"),
            *((f"peak of {name} memory", f"{gib:.2f} GiB") for name, gib in numbers["peak_gib"].items()),
            *((f"{name} busy", f"{seconds:.3g} s") for name, seconds in numbers["busy_s"].items()),
        ]
    )
    print()
    activations = numbers["choices"]["activations"]
    print_columns([(name, _shown(value)) for name, value in numbers["choices"].items() if name != "activations"])
    print()
    rows = [("layers", "input", "rest", "kept", "swapped")]
    rows += [
        (each["layers"], each["input"], each["rest"], *(_names(each.get(key, ())) for key in ("kept", "swapped")))
        for each in activations
    ]
    print_columns(rows)
    print()
    for reason in found.reasons:
        print(reason)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _names(operators: Any) -> str:
    return ", ".join(name.removeprefix("aten.").replace(".default", "") for name in operators) or "-"
