"""A job's progress on the terminal: its events, and a bar with the loss and the time left."""

import time
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from windlass.service.installation import ServiceClient

_LOOK_S = 0.3


def follow_job(client: ServiceClient, job_id: str) -> dict[str, Any]:
    """Shows a job until it has ended, and returns it. Without a terminal, prints one line for each event."""
    console = Console()
    if not console.is_terminal:
        return _print_lines(client, job_id)
    columns = (
        TextColumn("{task.fields[status]}"),
        BarColumn(),
        TextColumn("{task.completed:g}/{task.total:g}"),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[time_left]}"),
    )
    with Progress(*columns, console=console) as progress:
        task: TaskID | None = None
        preparing: TaskID | None = None
        loss = ""
        for job, events in client.follow(job_id):
            for event in events:
                if event["type"] == "metrics":
                    loss = _loss(event["data"], loss)
                else:
                    progress.console.print(format_event(event), markup=False, highlight=False)
            extra = job["windlass"]
            preparing = _show_preparation(progress, preparing, job)
            if task is None and extra["total_steps"]:
                task = progress.add_task("", total=extra["total_steps"], status="", loss="", time_left="")
            if task is not None:
                progress.update(
                    task, completed=extra["step"], status=job["status"], loss=loss, time_left=_time_left(job)
                )
    return job


def _show_preparation(progress: Progress, shown: TaskID | None, job: dict[str, Any]) -> TaskID | None:
    """Shows the progress of a job's preparation as a bar in percent, while there is a preparation."""
    state = job["windlass"]["preparation"]
    if state is None:
        if shown is not None:
            progress.remove_task(shown)
        return None
    if shown is None:
        shown = progress.add_task("", total=100, status="", loss="", time_left="")
    progress.update(shown, completed=state["percent"] or 0, status=state["summary"])
    return shown


def await_checks(client: ServiceClient, job_id: str) -> dict[str, Any]:
    """Shows the progress of a job's preparation on stderr until it has ended. Returns the job."""
    console = Console(stderr=True)
    shown = ""
    with console.status("checking the model and the files") as status:
        while (job := client.job(job_id))["status"] == "validating_files":
            extra = job["windlass"]
            state, reason = extra["preparation"], extra["waiting_reason"]
            told = f"waiting for {reason}" if reason else state["summary"] if state else ""
            if told and console.is_terminal:
                status.update(escape(told))
            elif reason and reason != shown:  # without a terminal, prints only long waits, each once
                console.print(f"waiting for {reason}", markup=False, highlight=False)
            shown = reason or shown
            time.sleep(_LOOK_S)
    return job


def format_event(event: dict[str, Any]) -> str:
    """Formats an event as one line."""
    level = "" if event["level"] == "info" else f"{event['level']}: "
    return f"{datetime.fromtimestamp(event['created_at']):%H:%M:%S} {level}{event['message']}"


def _print_lines(client: ServiceClient, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = {}
    for found, events in client.follow(job_id):
        job = found
        for event in events:
            print(format_event(event), flush=True)
    return job


def _loss(data: dict[str, Any], known: str) -> str:
    train, valid = data.get("train_loss"), data.get("valid_loss")
    if train is not None:
        return f"loss {train:.4f}"
    # A step's validation is a separate event. The bar shows it until the next step.
    return f"{known.split(',')[0]}, validation {valid:.4f}" if valid is not None else known


def _time_left(job: dict[str, Any]) -> str:
    if job["estimated_finish"] is None or (left_s := int(job["estimated_finish"] - time.time())) <= 0:
        return ""
    minutes, seconds = divmod(left_s, 60)
    hours, minutes = divmod(minutes, 60)
    mark = "estimated: " if job["windlass"]["finish_is_estimate"] else ""
    return f"{mark}{hours}:{minutes:02}:{seconds:02} left"
