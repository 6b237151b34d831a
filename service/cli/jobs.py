"""Commands for jobs, files and models."""

import json
import re
import shlex
import shutil
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from windlass.amounts import bytes_text
from windlass.engine.checkpoint import copy_model_folder, folder_nbytes
from windlass.engine.memory_plan import UpdateOrder
from windlass.engine.training_config import Optimizer
from windlass.service.cli.arguments import (
    FILE,
    JOB,
    MODEL,
    busy_gpus_in_words,
    client_for_job,
    gpus_in_words,
    gpus_option,
)
from windlass.service.cli.errors import CommandError, OptionError
from windlass.service.cli.follow import await_checks, follow_job, format_event
from windlass.service.cli.service import Home
from windlass.service.cli.step_timeline import boxes_in_words, print_trace
from windlass.service.cli.table import print_columns
from windlass.service.installation import RequestRefusedError, ServiceClient, Settings, load_settings, open_client
from windlass.service.validation import ApiError, did_you_mean, model_dir, models_in, near_names
from windlass.storage.ids import HEAD_NAME, Precision, StatePrecision

_NUMBER = re.compile(r"[-+]?[0-9]+([.][0-9]*)?")


def _words(help_: str, words: type[StrEnum], *more: str) -> Any:
    """An option with an enum's values. The service checks the value, as in every request."""
    return typer.Option(help=f"{help_}: {', '.join((*more, *words))}.")


def submit(
    model: Annotated[str, typer.Argument(help="A folder of the models directory, a hub id, or a fine-tuned model.")],
    file: Annotated[str, typer.Argument(help="The training file (.jsonl), or the id of one that was uploaded.")],
    validation_file: Annotated[str | None, typer.Option(help="A file to measure the loss on.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training file.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The peak learning rate.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens; longer examples are cut.")] = None,
    precision: Annotated[str | None, _words("Precision of the model's parameters", Precision)] = None,
    optimizer: Annotated[str | None, _words("The optimizer", Optimizer)] = None,
    state_precision: Annotated[str | None, _words("Precision of the stored optimizer states", StatePrecision)] = None,
    accumulation_precision: Annotated[
        str | None, typer.Option(help="Precision of accumulated gradients: fp32 or the model's.")
    ] = None,
    gradient_updates: Annotated[str | None, _words("When blocks are updated", UpdateOrder, "auto")] = None,
    max_bad_steps: Annotated[
        int | None, typer.Option(help="Consecutive steps with a NaN or an infinite value that may be skipped.")
    ] = None,
    gpus: Annotated[Any, gpus_option("GPUs of the job, or auto: as many as its plan says are fastest.")] = None,
    box: Annotated[str | None, typer.Option(help="The box to run on; else the one where the job ends first.")] = None,
    boxes: Annotated[
        str | None,
        typer.Option(
            help="Share the job's blocks among several boxes: their number, or names such as head,attic. The head is "
            "always one of them."
        ),
    ] = None,
    suffix: Annotated[str | None, typer.Option(help="A part of the new model's name.")] = None,
    seed: Annotated[int | None, typer.Option(help="For the order of examples and for dropout.")] = None,
    settings_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other job setting, as key=value; may be repeated.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Watch the job until it ends.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="End once the model and the files were checked, or at once.")
    ] = True,
    home: Home = None,
) -> None:
    """Upload a training file and start a job on it; end once the job's model and files were checked."""
    extras = {
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "sequence_length": sequence_length,
        "precision": precision,
        "optimizer": optimizer,
        "state_precision": state_precision,
        "accumulation_precision": accumulation_precision,
        "gradient_updates": gradient_updates,
        "max_bad_steps": max_bad_steps,
        "gpus": gpus,
        "box": box,
        "boxes": _parse_boxes(boxes),
    }
    request: dict[str, Any] = {"model": model, "windlass": _given(extras) | _parse_settings(settings_ or [])}
    request |= _given({"suffix": suffix, "seed": seed})
    with open_client(load_settings(home)) as client:
        job_id = _start_job(client, request, file, validation_file)
        if follow:
            _follow(client, job_id)
        elif wait:
            _await_checks(client, job_id)


def _parse_boxes(text: str | None, *, least: int = 2) -> int | list[str] | None:
    """Returns a number of boxes, or their names. Raises OptionError if it is neither."""
    if text is None:
        return None
    if text.isdecimal():
        return int(text)
    if _NUMBER.fullmatch(text):
        raise OptionError(f"--boxes: {text} is no number of boxes; give {least} or more, or names such as head,attic")
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise OptionError(f"--boxes: a name is empty in {text!r}; give names such as head,attic")
    if len(names) < least:
        raise OptionError(f"--boxes: {text} is one box; name all, such as head,{text}, or give --box {text}")
    return names


def jobs(home: Home = None) -> None:
    """List jobs, newest first."""
    with open_client(load_settings(home)) as client:
        rows = client.jobs()
    waits = any(job["windlass"]["waiting_reason"] for job in rows)
    named = any(job["suffix"] for job in rows)  # a job's suffix appears nowhere else until the job has ended
    placed = any(_box_of(job) not in ("", HEAD_NAME) for job in rows)
    names = ("job", *(("suffix",) if named else ()), *(("box",) if placed else ()))
    header = (*names, "status", "model", "step", "created", "fine-tuned model")
    table: list[tuple[object, ...]] = [(*header, *(("waiting for",) if waits else ()))]
    for job in rows:
        extra = job["windlass"]
        step = f"{extra['step']}/{extra['total_steps']}" if extra["total_steps"] else ""
        created = _time(job["created_at"])
        name = (job["id"], *((job["suffix"] or "",) if named else ()), *((_box_of(job),) if placed else ()))
        cells = (job["status"], job["model"], step, created, job["fine_tuned_model"] or "")
        table.append((*name, *cells, *((extra["waiting_reason"] or "",) if waits else ())))
    _print(table, empty="no jobs yet; start one with `windlass submit`")


def show(job: Annotated[str, typer.Argument(help="The job's id.")], home: Home = None) -> None:
    """Show one job."""
    with client_for_job(home, job) as client:
        found = client.job(job)
        metrics = [event for event in client.events(job) if event["type"] == "metrics"]
        extra = found["windlass"]
        is_measured = "measured" in (extra["last_metrics"] or {})
        occupies = _occupies(client, found)
        may_be_planned = extra["has_plan"] or is_measured or len(extra.get("boxes") or ()) > 1
        compared = _compared(client, job) if may_be_planned else {}
        files = {name: _named_file(client, found[name]) for name in ("training_file", "validation_file")}
    rows = {
        "job": found["id"],
        "suffix": found["suffix"],
        "status": found["status"],
        "waiting for": extra["waiting_reason"],
        "preparation": extra["preparation"] and extra["preparation"]["summary"],
        "error": found["error"] and found["error"]["message"],
        "model": found["model"],
        "box": _box_of(found) or None,
        "GPUs": gpus_in_words(extra),
        **_busy(extra["last_metrics"]),
        "fine-tuned model": found["fine_tuned_model"],
        "step": f"{extra['step']} of {extra['total_steps']}" if extra["total_steps"] else None,
        "last metrics": metrics[-1]["message"] if metrics else None,
        "trained tokens": found["trained_tokens"],
        **compared,
        "SSD wear": extra["ssd_wear"] and extra["ssd_wear"]["summary"],
        "occupies": occupies,
        "created": _time(found["created_at"]),
        "will finish": _finish(found),
        "finished": found["finished_at"] and _time(found["finished_at"]),
        "training file": files["training_file"],
        "validation file": files["validation_file"],
        "result files": ", ".join(found["result_files"]),
        "hyperparameters": json.dumps(extra["hyperparameters"] or found["hyperparameters"]),
    }
    print_columns([(name, value) for name, value in rows.items() if value not in (None, "")])


def _busy(metrics: dict[str, Any] | None) -> dict[str, str | None]:
    """Describes the last step of a job on several GPUs or boxes."""
    of_boxes = boxes_in_words((metrics or {}).get("timeline"))
    return dict(of_boxes) if of_boxes else {"GPUs busy": busy_gpus_in_words(metrics)}


def timeline(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    step: Annotated[int | None, typer.Option(min=1, help="One of the last steps; the last one without it.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the step's trace for ui.perfetto.dev to this file.")] = None,
    home: Home = None,
) -> None:
    """Draw when each resource worked in a step, by box, and say which box held up others."""
    with client_for_job(home, job) as client:
        found = client.timeline(job, step)
    if trace is None:
        print_trace(found, num_columns=shutil.get_terminal_size((100, 24)).columns)
        return
    try:
        trace.write_text(json.dumps(found))
    except OSError as error:
        raise CommandError(f"--trace {trace}: {error}") from error
    print(trace)


def _named_file(client: ServiceClient, file_id: str | None) -> str | None:
    if file_id is None:
        return None
    try:
        return f"{client.file(file_id)['filename']} ({file_id})"
    except RequestRefusedError:  # it was deleted since
        return file_id


def _finish(job: dict[str, Any]) -> str | None:
    if job["estimated_finish"] is None:
        return None
    mark = ", an estimate until enough steps are measured" if job["windlass"]["finish_is_estimate"] else ""
    return f"{_time(job['estimated_finish'])}{mark}"


def _box_of(job: dict[str, Any]) -> str:
    """Returns the box of a job, or all of them, or their number while they are not chosen."""
    extra = job["windlass"]
    asked = extra["settings"].get("boxes")
    if not extra["attempt"] and (box := extra["settings"].get("box")):
        return str(box)  # where it is to begin; its row is on the head until then
    return ", ".join(extra.get("boxes") or ()) or (f"{asked} boxes" if asked else extra.get("box") or "")


def _occupies(client: ServiceClient, job: dict[str, Any]) -> str:
    try:
        return _occupied(client.job_storage(job["id"]))
    except RequestRefusedError as error:
        if error.code != "job_elsewhere":
            raise
        box = job["windlass"]["box"]
        return "its states lie elsewhere" if box is None else f"its states lie on box {box}"


def _occupied(storage: dict[str, Any]) -> str:
    parts = sorted(storage["parts"].items(), key=lambda part: -part[1])
    named = ", ".join(f"{name.replace('_', ' ')} {bytes_text(nbytes)}" for name, nbytes in parts if nbytes)
    return f"{bytes_text(storage['bytes'])}: {named}" if named else "nothing"


def _compared(client: ServiceClient, job_id: str) -> dict[str, str]:
    """Describes the predicted and the measured values, as far as there are any."""
    from windlass.service.jobs import in_words

    try:
        return in_words(client.plan(job_id))
    except RequestRefusedError as error:
        if error.code != "plan_not_found":  # a job over several boxes that is not planned yet
            raise
        return {}


def logs(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until the job ends.")] = False,
    home: Home = None,
) -> None:
    """Print a job's events; with -f, show its progress."""
    with client_for_job(home, job) as client:
        if follow:
            _follow(client, job)
        else:
            for event in client.events(job):
                print(format_event(event))


def cancel(job: Annotated[str, typer.Argument(help="The job's id.")], home: Home = None) -> None:
    """Cancel a job; a running one ends after its step."""
    with client_for_job(home, job) as client:
        found = client.cancel(job)
    print(f"job {job} is cancelled" if found["status"] == "cancelled" else f"job {job} will end after its step")


def pause(job: Annotated[str, typer.Argument(help="The job's id.")], home: Home = None) -> None:
    """Pause a job; a running one commits its step, then releases its GPU and memory."""
    with client_for_job(home, job) as client:
        found = client.pause(job)
    print(f"job {job} is paused" if found["status"] == "paused" else f"job {job} will pause after its step")


def resume(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    gpus: Annotated[Any, gpus_option("GPUs of the job from now on, or auto; as before without it.")] = None,
    boxes: Annotated[
        str | None,
        typer.Option(
            help="Boxes of the job from now on: their number, 1 for the head's own, or names such as head,attic. Its "
            "states are moved first. As before without it."
        ),
    ] = None,
    home: Home = None,
) -> None:
    """Queue a paused job again; --gpus and --boxes give it others, with the same results."""
    asked = _parse_boxes(boxes, least=1)
    with client_for_job(home, job) as client:
        found = client.resume(job, gpus=gpus, boxes=asked)
    print(f"job {job} is {found['status']}")


def restart(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    box: Annotated[str | None, typer.Option(help="The box that the new job is to run on; any without it.")] = None,
    home: Home = None,
) -> None:
    """Begin a new job from the newest checkpoint of one that failed, or whose box is lost.

    The optimizer's states and the position in the data are lost.
    """
    with client_for_job(home, job) as client:
        found = client.restart(job, box=box)
    print(f"job {found['id']} goes on for job {job}; it is {found['status']}")


def files(home: Home = None) -> None:
    """List uploaded files and results, newest first."""
    with open_client(load_settings(home)) as client:
        rows = client.files()
    table: list[tuple[object, ...]] = [("file", "name", "bytes", "purpose", "created")]
    for file in rows:
        table.append((file["id"], file["filename"], file["bytes"], file["purpose"], _time(file["created_at"])))
    _print(table, empty="no files yet")


def models(home: Home = None) -> None:
    """List base and fine-tuned models."""
    settings = load_settings(home)
    with open_client(settings) as client:
        rows = client.models()
    table: list[tuple[object, ...]] = [("model", "from", "changed")]
    for model in rows:
        table.append((model["id"], model["owned_by"], _time(model["created"])))
    _print(table, empty=f"no models yet; put a Hugging Face model folder into {settings.models_dir}")


def checkpoints(job: Annotated[str, typer.Argument(help="The job's id.")], home: Home = None) -> None:
    """List a job's checkpoints, latest first."""
    with client_for_job(home, job) as client:
        rows = client.checkpoints(job)
    table: list[tuple[object, ...]] = [("checkpoint", "step", "why", "bytes", "training loss", "validation loss")]
    for row in rows:
        extra, metrics = row["windlass"], row["metrics"]
        losses = (metrics.get(name) for name in ("train_loss", "valid_loss"))
        cells = ("" if loss is None else f"{loss:.4f}" for loss in losses)
        why, nbytes = ", ".join(extra["reasons"]), "" if extra["bytes"] is None else extra["bytes"]
        table.append((row["fine_tuned_model_checkpoint"], row["step_number"], why, nbytes, *cells))
    _print(table, empty="no checkpoints yet")


def export(
    model: Annotated[str, typer.Argument(help="A fine-tuned model, a checkpoint, or the job that made it.")],
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    home: Home = None,
) -> None:
    """Copy a finished model to a folder of its own, for `AutoModelForCausalLM.from_pretrained`."""
    settings = load_settings(home)
    if model.startswith(JOB):
        model = _model_of_job(home, model)
    source = _model_folder(settings, model)
    if destination.exists():
        raise CommandError(f"{destination} exists already; choose a new folder")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # On stderr, because the command's output is the folder's name.
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(model, total=folder_nbytes(source))
            copy_model_folder(
                source, destination, links=False, on_progress=lambda nbytes: progress.update(task, completed=nbytes)
            )
    except OSError as error:
        raise CommandError(f"{model} could not be copied to {destination}: {error}") from error
    print(destination)


def _model_folder(settings: Settings, model: str) -> Path:
    """Returns the folder of a finished model. Raises CommandError if there is none."""
    is_fine_tuned = model.startswith(MODEL)
    try:
        folder = model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
        if (folder / "config.json").is_file():
            return folder
    except ApiError as error:
        if not is_fine_tuned:
            raise CommandError(str(error)) from None
    known = [name for folder in (settings.models_dir, settings.fine_tuned_dir) for name in models_in(folder)]
    advice = did_you_mean(near_names(model, known, separator="/"), "`windlass models` lists what there is")
    parent = settings.fine_tuned_dir if is_fine_tuned else settings.models_dir
    raise CommandError(f"there is no model {model!r} in {parent}; {advice}")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _start_job(client: ServiceClient, request: dict[str, Any], file: str, validation_file: str | None) -> str:
    """Uploads the files that are paths, creates the job, and prints its id."""
    if validation_file is not None:
        request["validation_file"] = _file_id(client, validation_file)
    request["training_file"] = _file_id(client, file)
    job_id: str = client.create_job(request)["id"]
    print(job_id)
    return job_id


def _file_id(client: ServiceClient, file: str) -> str:
    path = Path(file)
    if file.startswith(FILE) and not path.exists():
        return file
    if path.is_dir():
        raise CommandError(f"{file} is a folder; give the path of a .jsonl file, or the id of an uploaded one")
    if not path.is_file():
        beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        near = [str(path.with_name(name)) for name in near_names(path.name, beside, separator="/")]
        needed = f"give the path of a .jsonl file, or the id of an uploaded one ({FILE}…)"
        raise CommandError(f"there is no file {file}; {did_you_mean(near, needed)}")
    try:
        file_id: str = client.upload(path)["id"]
    except RequestRefusedError as error:
        raise RequestRefusedError(_with_path(error.message, file), error.code) from None
    return file_id


def _with_path(message: str, file: str) -> str:
    """Replaces a file's name in the service's error by the path that the user gave. The service knows only the name.

    The error's command that converts the file then works in the user's folder.
    """
    name = Path(file).name
    if name == file:
        return message
    if message.startswith(f"file: {name}"):
        message = f"file: {file}{message.removeprefix(f'file: {name}')}"
    for words in (f"got {name!r}", f"file: {name!r} is"):
        message = message.replace(words, words.replace(repr(name), repr(file)), 1)
    before, mark, command = message.rpartition("; convert it: ")
    in_command = re.compile(rf"(?<= ){re.escape(shlex.quote(name))}(?= )")
    return f"{before}{mark}{in_command.sub(lambda _: shlex.quote(file), command)}" if mark else message


def _parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Parses `key=value` pairs. A value is JSON if it parses as JSON, else text; `a.b=1` means `{"a": {"b": 1}}`."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise OptionError(f"--set takes key=value, got {pair!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *groups, name = key.removeprefix("windlass.").split(".")  # errors show settings with this prefix
        place = found
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise OptionError(f"--set {pair}: {group} has been set to {place!r}")
        place[name] = value
    return found


def _model_of_job(home: Path | None, job_id: str) -> str:
    with client_for_job(home, job_id) as client:
        job = client.job(job_id)
    if job["fine_tuned_model"] is None:
        raise CommandError(f"job {job_id} is {job['status']} and has no model; only jobs that succeeded have one")
    model: str = job["fine_tuned_model"]
    return model


def _follow(client: ServiceClient, job_id: str) -> None:
    try:
        job = follow_job(client, job_id)
    except KeyboardInterrupt:
        print(f"the job goes on; watch it with `windlass logs -f {job_id}`", file=sys.stderr)
        raise typer.Exit(130) from None
    if job["status"] != "succeeded":
        raise typer.Exit(1)
    print(job["fine_tuned_model"])


def _await_checks(client: ServiceClient, job_id: str) -> None:
    """Waits until a job's model and files are checked. Raises CommandError if the checks failed."""
    try:
        job = await_checks(client, job_id)
    except KeyboardInterrupt:
        print(f"the job goes on; `windlass show {job_id}` tells how its checks end", file=sys.stderr)
        raise typer.Exit(130) from None
    if job["status"] == "failed":
        raise CommandError(f"job {job_id} failed: {job['error']['message']}")


def _print(table: list[tuple[object, ...]], empty: str) -> None:
    """Prints a table whose first row is its header, or `empty` if there are no other rows."""
    if len(table) == 1:
        print(empty)
    else:
        print_columns(table)


def _time(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
