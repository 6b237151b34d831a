"""The command `plan`: predicts a job's time and memory on a machine, before anything runs."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from windlass.actors.lifecycle import WAIT_POLICY
from windlass.amounts import number_text
from windlass.engine.memory_plan import LEAST_CUT_NUMEL, UpdateOrder
from windlass.engine.training_config import Optimizer
from windlass.planner.hardware import Hardware, organization_of, unusual
from windlass.planner.profiling import longest_of
from windlass.planner.solver import DEFAULT_SLACK, Goal
from windlass.service.cli import CommandError, OptionError
from windlass.service.cli.arguments import gpus_option
from windlass.service.cli.plan.checks import check_gpus_of, check_order_of_updates, check_search, settings_of
from windlass.service.cli.plan.inputs import (
    MEASURED,
    config_of,
    hardware_of,
    is_id,
    measured_network_gb_per_s,
    shape_name,
)
from windlass.service.cli.plan.over_boxes import Boxes, asked_boxes, boxes_of, print_plans_over_boxes
from windlass.service.cli.plan.printing import (
    change_in_words,
    print_comparison,
    print_found,
    print_job_settings,
    print_report,
    print_what_if,
)
from windlass.service.installation import Settings, load_settings, num_cores
from windlass.service.validation import (
    DEFAULT_CLIP_NORM,
    LEAST_SEQUENCE_LENGTH,
    MAX_BOXES,
    MAX_EPOCHS,
    MAX_EXAMPLES,
    MAX_PLANNED_BATCH_SIZE,
    MAX_SEQUENCE_LENGTH,
    WindlassSettings,
)
from windlass.storage.ids import Precision, StatePrecision

if TYPE_CHECKING:
    from windlass.planner.planning import Comparison, Planned, Watcher
    from windlass.planner.question import PlanQuestion, PlanReport, Profiles
    from windlass.planner.solver import Solution
    from windlass.planner.stages import StagesReport

EXIT_DOES_NOT_FIT = 3  # the exit code of the command if no plan fits; 2 is that of wrong options
_MODEL_HELP = (
    "A model's folder or name, the name of a published model whose shape is known (such as llama-3.1-70b, or as on the "
    "hub; nothing is downloaded), or a YAML file with a shape's numbers."
)


def plan(
    model: Annotated[str, typer.Option(help=_MODEL_HELP)],
    batch_size: Annotated[int, typer.Option(min=1, max=MAX_PLANNED_BATCH_SIZE, help="Examples per step.")],
    seq_len: Annotated[
        int, typer.Option(min=LEAST_SEQUENCE_LENGTH, max=MAX_SEQUENCE_LENGTH, help="Tokens per example.")
    ],
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            help="A YAML file, 'measured' (this one, and its settings; the default), the name of a published machine, "
            "a desktop such as rtx4090:gpus=2,ram=128,ssds=2 (docs/hardware.md), or a box that has joined. Once for "
            "each kind of box."
        ),
    ] = None,
    boxes: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Plan one job over up to so many of these boxes, at most {MAX_BOXES} in all. With several kinds, "
            "once for each --hardware. Or the names of boxes that have joined this head, such as head,attic."
        ),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            max=1e6,
            help="Rate of each box's network card in Gbit/s (default: network_gb_per_s of the hardware, in GB/s; "
            "without it, on a head, the slowest rate that `windlass doctor --network` has measured).",
        ),
    ] = None,
    num_microbatches: Annotated[
        int | None, typer.Option(min=1, help="Parts a step is computed in (default: what is fastest).")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Precision of the model.")] = Precision.BF16,
    state_precision: Annotated[
        StatePrecision, typer.Option(help="Precision of the optimizer's states.")
    ] = StatePrecision.FP32,
    optimizer: Annotated[
        Optimizer, typer.Option(help="The optimizer; a step takes the same time with both.")
    ] = Optimizer.ADAMW,
    clip: Annotated[bool, typer.Option(help="Clip the gradient's norm.")] = True,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            help=f"The largest norm of all gradients (default {DEFAULT_CLIP_NORM:g}); a step takes the same time with "
            "any, and the printed job has it."
        ),
    ] = None,
    gradient_updates: Annotated[
        str,
        typer.Option(
            help=f"When blocks are updated: auto (the fastest order that is exact), {', '.join(UpdateOrder)}."
        ),
    ] = "auto",
    accumulation_precision: Annotated[
        Precision, typer.Option(help="Precision of accumulated gradients: fp32, or the model's.")
    ] = Precision.FP32,
    cut_matrices: Annotated[
        str,
        typer.Option(
            help="Matrices are computed in parts of at most so many elements, so that they take less GPU memory: a "
            f"number from {LEAST_CUT_NUMEL} (2^20), auto (as far as that is of use), off."
        ),
    ] = "auto",
    lanes: Annotated[
        int | None,
        typer.Option(min=1, help="Sums of micro-batches that are made separately and then added (default 1)."),
    ] = None,
    gpus: Annotated[Any, gpus_option("GPUs of the job, or auto: as many as are fastest.")] = 1,
    num_validation_examples: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_EXAMPLES, help="Examples of a validation file: evaluations take device memory, too."
        ),
    ] = 0,
    num_examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_EXAMPLES,
            help="Examples of the training file, to tell the time and the writes of the whole job.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=MAX_EPOCHS, help="Times that a job goes through its examples (default 3).")
    ] = None,
    find: Annotated[
        Goal | None, typer.Option(help="Search the largest or smallest number with which the job fits.")
    ] = None,
    slack: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="With --find of SSDs and RAM: how much longer a step may take, as a share of it "
            f"(default {DEFAULT_SLACK:g}).",
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline of a simulated step to this file.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also estimate the systems of the papers (docs/papers.md).")
    ] = False,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="Also plan the job with one more SSD, 64 GiB more RAM, a faster card, one more GPU, a second box, "
            "twice the batch, no clipping, or states in less space.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    home: Annotated[Path | None, typer.Option(help="The home directory; else WINDLASS_HOME, else ~/.windlass.")] = None,
) -> None:
    """Tell whether a job fits a machine, how long a step takes, what bounds it, what to change.

    The exit code is 3 if no plan fits, and 2 for options that are wrong or do not go together. It is 1 for any other
    error, such as an unknown model.
    """
    settings = load_settings(home)
    names, numbers = asked_boxes(hardware, boxes)
    kinds = boxes_of(
        [(name, hardware_of(settings, name)) for name in names],
        numbers,
        network_gbit_per_s=network,
        measured_gb_per_s=lambda: measured_network_gb_per_s(settings),
        others={
            "--find": find,
            "--trace": trace,
            "--compare": compare,
            "--what-if": what_if,
            "--num-examples": num_examples,
            "--epochs": epochs,
        },
    )
    machine = kinds[0].hardware
    if find is Goal.LARGEST_BATCH:  # the smallest batch that is searched has an example for each lane and GPU
        batch_size = max(batch_size, lanes or 1, 1 if gpus == "auto" else gpus)
    if num_microbatches is not None and num_microbatches > batch_size:
        raise OptionError(
            f"--num-microbatches: {num_microbatches} parts of a batch of {batch_size}; each has at least one example"
        )
    most = num_microbatches or batch_size
    if lanes is not None and lanes > most:
        raise OptionError(f"--lanes: {lanes} lanes of at most {most} micro-batches; each has at least one")
    if gpus != "auto":
        if gpus > most:
            raise OptionError(f"--gpus: {gpus} GPUs for at most {most} micro-batches; each computes at least one")
        for kind in kinds:
            check_gpus_of(settings, gpus, other=None if kind.name == MEASURED else kind.hardware)
    check_search(find, machine, gpus=gpus, what_if=what_if, slack=slack)
    slack = DEFAULT_SLACK if slack is None else slack
    check_order_of_updates(gradient_updates, clip=clip)
    if clip_norm is not None and not clip:
        raise OptionError(f"--clip-norm: gradients are not clipped to {clip_norm:g} with --no-clip; leave one out")
    asked = settings_of(
        **({} if epochs is None else {"epochs": epochs}),
        num_microbatches=num_microbatches,
        precision=precision,
        state_precision=state_precision,
        optimizer=optimizer,
        clip_norm=(DEFAULT_CLIP_NORM if clip_norm is None else clip_norm) if clip else None,
        accumulation_precision=accumulation_precision,
        gradient_updates=gradient_updates,
        cut_matrices=int(cut_matrices) if cut_matrices.isdecimal() else cut_matrices,
        lanes="auto" if lanes is None else lanes,
        gpus=gpus,
    )

    def question_about(kind: Boxes) -> "PlanQuestion":
        return _question(
            settings,
            model,
            kind.hardware,
            asked,
            is_local=kind.name == MEASURED,
            batch_size=batch_size,
            sequence_length=seq_len,
            num_validation_examples=num_validation_examples,
        )

    # shown only on a terminal
    with Console(stderr=True).status("planning; some seconds, more where memory is short") as status:
        question = question_about(kinds[0])
        shape = shape_name(settings, model)
        if not as_json and shape is not None and shape != model:
            of = organization_of(shape)
            print(f"the model has the published shape {shape}{f' of {of}' if of else ''}")
        traced = "tracing the model, because it was not planned before; some seconds more"
        question = replace(question, on_trace=lambda: status.update(traced))
        if boxes is not None:
            questions = [question, *map(question_about, kinds[1:])]
            status.update("planning each number of boxes: some seconds for each")
            plans, lacks = _plans_over_boxes(kinds, questions)
            warnings = list(dict.fromkeys(warning for kind in kinds for warning in unusual(kind.hardware)))
            print_plans_over_boxes(kinds, plans, lacks, warnings, shape=shape, as_json=as_json)
            raise typer.Exit(0 if plans else EXIT_DOES_NOT_FIT)
        if find is not None:
            status.update(f"looking for the {find.replace('-', ' ')}: one plan after the other, up to some minutes")
        number, num_params, question, planned = _answer(question, find, slack, tell=status.update)
        if trace is not None and planned.solution is not None:
            _trace(planned, trace)
        compared = _compare(question, planned) if compare else None
    found = (_with_what_if(question, planned) if what_if and as_json else planned).report
    is_here = kinds[0].name == MEASURED
    totals = _totals_of_job(settings, question, asked, found, num_examples=num_examples, is_here=is_here)
    job_settings = _job_settings(question, asked, found)
    if as_json:
        result = {"find": find, "number": number, "num_params": num_params}
        of_search = {} if find is None else {**result, "unit": find.unit}
        of_systems = {} if compared is None else {"compare": asdict(compared)}
        about = {"shape": shape, "job_settings": job_settings, **totals, "warnings": unusual(machine)}
        print(json.dumps(of_search | asdict(found) | of_systems | about, indent=2))
    else:
        for warning in unusual(machine):
            print(f"! {warning}")
        if find is not None and number:
            longest = longest_of(question.config) if find is Goal.LONGEST_CONTEXT else None
            print_found(find, number, num_params, longest=longest)
            print()
        print_report(found, **totals, num_ssds=question.hardware.ssds.count, is_cpu=not question.has_gpu)
        if job_settings is not None:
            print()
            submitted = model if is_id(settings, model) else "MODEL"
            print_job_settings(submitted, job_settings, is_open=num_microbatches is None)
        if what_if:
            print(flush=True)
            print_what_if(_with_what_if(question, planned).report)
        if compared is not None:
            print()
            print_comparison(found, compared)
    if not found.feasible:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _plans_over_boxes(
    kinds: Sequence[Boxes], questions: "Sequence[PlanQuestion]"
) -> "tuple[list[StagesReport], list[str]]":
    """Returns the plans. If there are none, also what each box lacks with all boxes together."""
    from windlass.engine.memory_estimate import DeviceNeedUnknownError
    from windlass.engine.model import UnsupportedArchitectureError
    from windlass.planner.profiling import UnusableConfigError
    from windlass.planner.question import KeptShapes
    from windlass.planner.stages import BoxKind, StagesError, plans_over_boxes, what_boxes_lack

    shapes = KeptShapes()  # so that the model is traced once
    asked = [
        BoxKind(name=kind.name, number=kind.number, question=replace(question, kept_shapes=shapes))
        for kind, question in zip(kinds, questions, strict=True)
    ]
    try:
        plans = plans_over_boxes(asked)
        return plans, [] if plans else what_boxes_lack(asked)
    except StagesError as error:
        raise CommandError(f"--boxes: {error}") from None
    except (UnsupportedArchitectureError, DeviceNeedUnknownError, UnusableConfigError) as error:
        raise CommandError(f"--model: {' '.join(str(error).split())}") from None


def _question(
    settings: Settings,
    model: str,
    machine: Hardware,
    asked: WindlassSettings,
    *,
    is_local: bool,
    batch_size: int,
    sequence_length: int,
    num_validation_examples: int,
) -> "PlanQuestion":
    """Makes the question that a job's preparation would send to the planner. The answer then holds for such a job."""
    os.environ.update(WAIT_POLICY)  # before torch is imported, where it is
    from windlass.planner.planning import question_of
    from windlass.service.jobs import MachineResources, hypothetical_request

    config = config_of(settings, model, sequence_length)
    is_alone = is_local and _is_box_free(settings)
    request = hypothetical_request(
        settings,
        machine,
        MachineResources.here(settings) if is_local else None,
        model_dir=Path(model),
        asked=asked,
        batch_size=batch_size,
        sequence_length=sequence_length,
        num_validation_examples=num_validation_examples,
        has_gpus=is_alone and machine.gpus.count > 0,
        is_alone=is_alone,
    )
    return question_of(request, config, is_alone=lambda: is_local and _is_box_free(settings))


def _is_box_free(settings: Settings) -> bool:
    from windlass.service.processes import is_box_free  # it loads the database's library

    return is_box_free(settings)


def _answer(
    question: "PlanQuestion", goal: Goal | None, slack: float, *, tell: Callable[[str], None]
) -> tuple[int, int, "PlanQuestion", "Planned"]:
    """Plans the job or searches for the goal. Returns the number found, its parameters, and the question and plan.

    The number is 0 without a search, or if nothing fits. `tell`: shows what goes on, with the estimate by the machine's
    rates while the model's blocks are measured.
    """
    from windlass.engine.memory_estimate import DeviceNeedUnknownError
    from windlass.engine.model import UnsupportedArchitectureError
    from windlass.planner.planning import NOBODY, answer, choose_gpus, find
    from windlass.planner.profiling import UnusableConfigError

    watcher = _telling(tell) if question.measures else NOBODY
    try:
        if question.chooses_ranks:
            return 0, 0, question, choose_gpus(question, watcher).planned
        if goal is not None and (found := find(question, goal, slack=slack)).planned is not None:
            return found.number, found.num_params, found.question, found.planned
        return 0, 0, question, answer(question, watcher)
    except (UnsupportedArchitectureError, DeviceNeedUnknownError, UnusableConfigError) as error:
        raise CommandError(f"--model: {' '.join(str(error).split())}") from None


def _telling(tell: Callable[[str], None]) -> "Watcher":
    """Returns a watcher that tells the estimates, and which measurement goes on."""
    from windlass.planner.planning import Watcher

    estimated = "planning"

    def see_estimate(_question: "PlanQuestion", profiles: "Profiles", solution: "Solution") -> None:
        nonlocal estimated
        step = number_text(solution.step_s)
        by_rates = profiles.is_by_rates
        estimated = f"about {step} s a step by the machine's rates" if by_rates else f"at least {step} s a step"
        tell(f"planning: {estimated}")

    def see_measurement(what: str, done: int, total: int) -> None:
        tell(f"{estimated}; measuring {what} ({done + 1} of {total})")

    return Watcher(see_estimate=see_estimate, see_measurement=see_measurement)


def _job_settings(question: "PlanQuestion", asked: WindlassSettings, found: "PlanReport") -> dict[str, Any] | None:
    """Returns the settings of a job with this plan, for a request's object `windlass`.

    Returns None if no such job exists.
    """
    from windlass.service.jobs import settings_of_plan

    return None if question.num_layers is not None else settings_of_plan(asked, question.training, found)


def _totals_of_job(
    settings: Settings,
    question: "PlanQuestion",
    asked: WindlassSettings,
    found: "PlanReport",
    *,
    num_examples: int | None,
    is_here: bool,
) -> dict[str, Any]:
    from windlass.service.jobs import least_rated_tb, totals_of_job

    ssds = question.hardware.ssds
    return totals_of_job(
        asked,
        found,
        batch_size=question.training.batch_size,
        num_examples=num_examples,
        num_ssds=ssds.count,
        rated_tb=least_rated_tb(settings, ssds, is_here=is_here),
    )


def _trace(planned: "Planned", path: Path) -> None:
    """Writes the timeline of a simulated step to the file."""
    from windlass.actors.timeline import trace_of
    from windlass.planner.simulation import simulate_planned

    if planned.layout is None:
        raise OptionError("--trace: there is no model of that many layers to simulate; leave out --find most-layers")
    assert planned.solution is not None, "there is a plan"
    simulated = simulate_planned(planned.solution, planned.layout, num_cores=num_cores())
    last = simulated.steps[-1]
    memory = {
        tier: {"allocated_nbytes": found.allocated_nbytes, "peak_nbytes": found.peak_nbytes}
        for tier, found in simulated.memory.items()
    }
    about = {"summary": last.summary, "memory": memory}
    trace = trace_of(last.spans, begins_s=last.start_s, about=about, levels=last.levels)
    try:
        path.write_text(json.dumps(trace))
    except OSError as error:
        raise CommandError(f"--trace: {path} cannot be written: {error}") from None


def _with_what_if(question: "PlanQuestion", planned: "Planned") -> "Planned":
    """Plans the changes, with a bar on a terminal, which also tells what is measured, and the largest gain so far."""
    from windlass.planner.answers import with_what_if
    from windlass.planner.planning import Watcher

    console, planning = Console(stderr=True), "planning with one thing changed"
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(planning, total=None)

        def see_measurement(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"measuring {what}", completed=done, total=total)

        def tell(so_far: "Planned", num_left: int) -> None:
            changes = so_far.report.what_if or ()
            best = f"; most so far: {change_in_words(changes[0])}" if changes else ""
            num_planned = len(changes)
            progress.update(task, description=planning + best, completed=num_planned, total=num_planned + num_left)

        return with_what_if(question, planned, Watcher(see_measurement=see_measurement), tell=tell)


def _compare(question: "PlanQuestion", planned: "Planned") -> "Comparison":
    from windlass.planner.planning import comparison

    return comparison(question, planned)
