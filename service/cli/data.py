"""Commands for stored data: disk usage, deletion, backups."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from windlass.amounts import bytes_text
from windlass.service.cli.arguments import FILE, JOB, MODEL, told_if_unknown
from windlass.service.cli.errors import CommandError
from windlass.service.cli.service import Home
from windlass.service.cli.table import print_columns
from windlass.service.installation import ServiceClient, Settings, load_settings, open_client
from windlass.storage.ids import JobId


def storage(
    limit: Annotated[int, typer.Option(min=0, help="Number of items to list, largest first.")] = 20,
    home: Home = None,
) -> None:
    """Show the disk usage of jobs, their states on SSDs, checkpoints, models and files."""
    with open_client(load_settings(home)) as client:
        found = client.storage()
    rows, totals = found["data"], found["windlass"]
    if limit and rows:
        shown = [(bytes_text(row["bytes"]), row["kind"].replace("_", " "), row["id"]) for row in rows[:limit]]
        print_columns([("size", "kind", "what"), *shown])
        if len(rows) > limit:
            print(f"… and {len(rows) - limit} more; --limit shows them")
        print()
    by_kind = sorted(totals["bytes_by_kind"].items(), key=lambda item: -item[1])
    print_columns(
        [
            *((f"all {kind.replace('_', ' ')}", bytes_text(nbytes)) for kind, nbytes in by_kind),
            ("together", bytes_text(totals["bytes"])),
            ("free on the home's disk", bytes_text(totals["free_bytes"])),
        ]
    )


def delete(
    ids: Annotated[list[str], typer.Argument(help="Finished jobs, files, fine-tuned models, checkpoints.")],
    model: Annotated[bool, typer.Option("--model", help="Also delete the jobs' fine-tuned models.")] = False,
    states: Annotated[
        bool,
        typer.Option("--states", help="Only free the states on SSDs of jobs that this installation does not know."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    home: Home = None,
) -> None:
    """Delete jobs with their events, checkpoints and result files; or files, models and single checkpoints."""
    for each in ids:
        if not each.startswith((JOB, FILE, MODEL)):
            raise CommandError(
                f"{each!r} is not the id of a job ({JOB}…), a file ({FILE}…), or a fine-tuned model or checkpoint "
                f"({MODEL}…)"
            )
    what = ids[0] if len(ids) == 1 else f"these {len(ids)}"
    if states:
        _ask(f"Free the states of {what}? If another installation has the job, it cannot go on", is_sure=yes)
        _free_states(load_settings(home), ids)
        return
    with open_client(load_settings(home)) as client:
        also = ", fine-tuned models included" if model else ""
        _ask(f"Delete {what}{also}? This cannot be undone", is_sure=yes)
        for each in ids:
            with told_if_unknown(client, each):
                _delete(client, each, with_model=model)
            print(f"{each} is deleted")


def _ask(question: str, *, is_sure: bool) -> None:
    if not is_sure and sys.stdin.isatty():
        typer.confirm(question, abort=True)


def _free_states(settings: Settings, ids: list[str]) -> None:
    from windlass.service.cli.orphaned_states import free_unknown_states  # imports the database's library

    for each in ids:
        if not each.startswith(JOB):
            raise CommandError(f"{each!r} is not the id of a job ({JOB}…), whose states could be freed")
        print(f"{each}: {bytes_text(free_unknown_states(settings, JobId(each)))} are free again")


def _delete(client: ServiceClient, what: str, *, with_model: bool) -> None:
    if what.startswith(JOB):
        client.delete_job(what, with_model=with_model)
    elif what.startswith(FILE):
        client.delete_file(what)
    else:
        client.delete_model(what)


def backup(
    destination: Annotated[Path, typer.Argument(help="The folder to create.")],
    models: Annotated[bool, typer.Option(help="Also copy base models in the home.")] = True,
    local_key: Annotated[bool, typer.Option(help="Also copy the API key of this machine's command line.")] = False,
    home: Home = None,
) -> None:
    """Copy the home, while the service runs or not: database, files, jobs, models, settings and the digests of keys."""
    from windlass.service.data import make_backup

    made = make_backup(load_settings(home), destination, with_base_models=models, with_local_key=local_key)
    print(f"{destination}: {bytes_text(made.nbytes)}")
    for remark in made.remarks:
        print(f"! {remark}")


def restore(
    source: Annotated[Path, typer.Argument(help="A folder that `windlass backup` made.")],
    home: Home = None,
) -> None:
    """Make a new home from a backup; it must not exist yet."""
    from windlass.service.data import restore_backup

    restored = restore_backup(source, home)
    print(f"{restored.home}: {bytes_text(restored.nbytes)}")
    for remark in restored.remarks:
        print(f"! {remark}")
