"""Commands for the boxes of a service: on the head, and on a box that joins or leaves one."""

import contextlib
import os
import re
import socket
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.amounts import bytes_text
from windlass.service.cli import CommandError, Home, print_columns
from windlass.service.installation import load_settings, open_client, place_of_home
from windlass.service.validation import ReportedError, count_text, told_jobs

_HEARD_TIMEOUT_S = 60.0
_GIB = 1024**3

BoxName = Annotated[str, typer.Argument(help="The box's name, as `windlass node list` shows it.")]


def code(home: Home = None) -> None:
    """Make a code with which one box may join, and print the commands to type on that box."""
    with open_client(load_settings(home)) as client:
        answer = client.new_join_code()
    minutes = max(1, round((answer["expires_at"] - time.time()) / 60))
    print(f"On the new box, within {minutes} minutes (the code serves one box):\n")
    for command in answer["commands"]:
        print(f"  {command}")


def list_(home: Home = None) -> None:
    """List the boxes, with their state, their devices and their jobs."""
    with open_client(load_settings(home)) as client:
        boxes = client.boxes()
    print_columns(
        [("name", "state", "devices", "memory free", "running", "waiting", "link", "address"), *map(_row, boxes)]
    )
    for box in boxes:
        if box["unequal_versions"]:
            print(f"! {box['name']}: other versions than the head's: {', '.join(box['unequal_versions'])}")
        for finding in box["findings"]:
            if finding["is_problem"]:
                print(f"! {box['name']}: {finding['text']}")


def drain(name: BoxName, home: Home = None) -> None:
    """Give a box no more jobs. Its attempts end at a commit, and its jobs wait there until `resume`."""
    with open_client(load_settings(home)) as client:
        box = client.change_box(name, "drain")
    print(f"box {name} is draining; running there still: {box['jobs']['running']['total']}")


def resume(name: BoxName, home: Home = None) -> None:
    """Use a drained box again."""
    with open_client(load_settings(home)) as client:
        client.change_box(name, "resume")
    print(f"box {name} gets jobs again")


def remove(
    name: BoxName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    home: Home = None,
) -> None:
    """Remove a box: its calls are refused at once, and its jobs that have begun wait for a person."""
    with open_client(load_settings(home)) as client:
        jobs = client.box(name)["jobs"]
        held = sum(jobs[kind]["total"] for kind in ("running", "waiting", "paused"))
        if held:
            print(
                f"box {name} has {count_text(held, 'unfinished job')}. Those that have not begun go back to the "
                "queue. Those that have begun stop, because their states are on it; `windlass restart` starts them "
                "elsewhere."
            )
        if not yes:
            typer.confirm(f"Remove box {name}?", abort=True)
        client.change_box(name, "remove")
    print(f"box {name} was removed; with a new code it can join again")


def join(
    head: Annotated[str, typer.Option(help="HOST:PORT of the head, as `windlass node code` prints it.")],
    code: Annotated[str, typer.Option(help="The code that `windlass node code` printed on the head.")],
    ssd: Annotated[list[Path], typer.Option(help="A directory on an SSD, or its block device; once for each SSD.")],
    name: Annotated[str | None, typer.Option(help="The box's name (default: the machine's).")] = None,
    measure: Annotated[bool, typer.Option(help="Measure the machine if it was not measured.")] = True,
    home: Home = None,
) -> None:
    """Make this machine a box of a head: the head's jobs then run here, too."""
    from windlass.service.auth import migrate_database
    from windlass.service.cluster.authority import JoinCode
    from windlass.service.cluster.box import (
        ask_to_join,
        check_home,
        match_versions,
        meet_head,
        settings_of_box,
        url_of_head,
    )
    from windlass.service.processes import ensure_measured, start_detached

    parsed, url, place = JoinCode.parse(code), url_of_head(head), place_of_home(home)
    box_name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).strip("-._")[:63] or "box"
    check_home(place)
    facts = meet_head(url, parsed)
    print(f"{url} is the head that made the code", flush=True)
    match_versions(facts, _tell)
    os.environ["WINDLASS_HOME"] = str(place)
    with settings_of_box(place, ssd, _tell) as settings:
        print(f"the home is {place}, with {count_text(len(settings.ssd_dirs), 'SSD')}", flush=True)
        migrate_database(settings)
        membership = ask_to_join(settings, facts, parsed, box_name)
    print(f"joined as box {membership.name}; the certificate is in {place / 'box'}", flush=True)
    if measure and settings.measure:
        ensure_measured(settings, _tell)
    serving = start_detached(settings)
    print(f"started (process {serving.process.pid})", flush=True)
    _await_head(place)
    print(f"the head has heard from box {membership.name}; its jobs run here from now on")


def leave(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Leave also if the head cannot be told.")] = False,
    home: Home = None,
) -> None:
    """Leave the head: end this box's work, and remove its certificate. Jobs that have begun here do not go on.

    Parts of jobs over several boxes are removed.
    """
    from windlass.service.cluster.box import (
        BoxRemoved,
        HeadUnreachable,
        discard_parts,
        forget_head,
        leave_head,
        membership_of,
    )
    from windlass.service.processes import jobs_with_parts, running_jobs, shut_down
    from windlass.storage.sql import Database, migrate

    settings = load_settings(home)
    membership = membership_of(settings.home)
    if membership is None:
        raise CommandError(f"{settings.home} is no box of a head; there is nothing to leave")
    if not yes:
        parts = jobs_with_parts(settings)
        if running := [job for job in running_jobs(settings) if job not in parts]:
            print(f"running here: {told_jobs(running)}. The head shows that as stopped; the states stay on this box.")
        if parts:
            print(
                f"over several boxes, with states here: {told_jobs(parts)}. These states will be removed, and "
                "`windlass restart` then begins again from the newest exported model. To lose nothing, pause on the "
                "head and resume with `windlass resume JOB --boxes` and other boxes, before this box leaves."
            )
        typer.confirm(f"Leave {membership.head}?", abort=True)
    try:
        leave_head(settings.home)
    except BoxRemoved:
        print("the head has removed this box already")
    except HeadUnreachable as error:
        if not forget:
            raise CommandError(
                f"{error}; try again later, or leave with --forget, and run "
                f"`windlass node remove {membership.name}` on the head"
            ) from None
        print(f"! {error}; run `windlass node remove {membership.name}` on the head")
    except ReportedError as error:  # such as a damaged key
        if not forget:
            raise
        print(f"! {error}; run `windlass node remove {membership.name}` on the head")
    shut_down(settings, force=True)
    migrate(settings.database_url)  # a box that was never started has no tables
    with contextlib.closing(Database(settings.database_url)) as database:
        for job_id in discard_parts(database, settings):
            print(f"! some files or states of job {job_id} could not be removed")
    forget_head(settings.home)
    print(f"left {membership.head}; {settings.home} and its SSD directories are as they were, delete them if you like")


def _await_head(home: Path) -> None:
    from windlass.service.cluster.box import HeadUnreachable, has_been_heard

    deadline, last = time.monotonic() + _HEARD_TIMEOUT_S, "its agent has not called yet"
    while time.monotonic() < deadline:
        try:
            if has_been_heard(home):
                return
        except HeadUnreachable as error:
            last = str(error)
        time.sleep(0.2)
    raise CommandError(f"joined, but the head has not heard from this box: {last}; see {home / 'logs' / 'agent.log'}")


def _row(box: dict[str, Any]) -> tuple[str, ...]:
    devices, jobs, free = box["devices"], box["jobs"], box["memory"]["free_bytes"]
    return (
        box["name"],
        box["state"],
        f"{devices['used']} of {devices['total']} {devices['kind']} in use",
        "-" if free is None else f"{free / _GIB:.1f} of {box['memory']['total_bytes'] / _GIB:.1f} GiB",
        str(jobs["running"]["total"]),
        str(jobs["waiting"]["total"] + jobs["paused"]["total"]),
        "-" if box["link_bytes_per_s"] is None else f"{bytes_text(box['link_bytes_per_s'])}/s",
        box["address"] or "here",
    )


def _tell(line: str) -> None:
    print(line, flush=True)
