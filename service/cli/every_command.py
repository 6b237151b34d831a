"""All commands of `windlass`."""

import sys
from collections.abc import Callable

import typer

from windlass.service.cli import data as cli_data
from windlass.service.cli import jobs as cli_jobs
from windlass.service.cli import plan as cli_plan
from windlass.service.cli import service as cli_service
from windlass.service.cli import webhooks as cli_webhooks
from windlass.service.cli.boxes import nodes as cli_nodes
from windlass.service.cli.errors import reported

_COMMANDS = (
    cli_service.up,
    cli_service.down,
    cli_service.status,
    cli_service.doctor,
    cli_plan.plan,
    cli_jobs.submit,
    cli_jobs.jobs,
    cli_jobs.show,
    cli_jobs.timeline,
    cli_jobs.logs,
    cli_jobs.pause,
    cli_jobs.resume,
    cli_jobs.restart,
    cli_jobs.cancel,
    cli_jobs.files,
    cli_jobs.models,
    cli_jobs.checkpoints,
    cli_jobs.export,
    cli_data.storage,
    cli_data.delete,
    cli_data.backup,
    cli_data.restore,
)
_KEYS = "keys"


def add_commands(app: typer.Typer) -> None:
    """Adds all commands to the command line."""
    for command in _COMMANDS:
        app.command()(reported(command))
    app.add_typer(_webhook_commands(), name="webhooks")
    app.add_typer(_node_commands(), name="node")
    app.add_typer(_key_commands(), name=_KEYS)


def _webhook_commands() -> typer.Typer:
    webhooks = typer.Typer(help="Webhooks: HTTP calls to a URL when jobs end.", no_args_is_help=True)
    _add(
        webhooks,
        create=cli_webhooks.create,
        list=cli_webhooks.list_,
        test=cli_webhooks.send_sample,
        delete=cli_webhooks.delete,
    )
    return webhooks


def _node_commands() -> typer.Typer:
    nodes = typer.Typer(help="Several boxes, one service: join, list, drain, remove.", no_args_is_help=True)
    _add(
        nodes,
        code=cli_nodes.code,
        join=cli_nodes.join,
        list=cli_nodes.list_,
        drain=cli_nodes.drain,
        resume=cli_nodes.resume,
        remove=cli_nodes.remove,
        leave=cli_nodes.leave,
    )
    return nodes


def _key_commands() -> typer.Typer:
    """Returns the group of commands for keys. It is filled only when used, because it loads the database's library."""
    keys = typer.Typer(help="API keys, and the audit of what was done with them.", no_args_is_help=True)
    if _KEYS in sys.argv[1:]:
        from windlass.service.cli import keys as cli_keys

        _add(
            keys,
            create=cli_keys.create,
            list=cli_keys.list_,
            limit=cli_keys.limit,
            revoke=cli_keys.revoke,
            audit=cli_keys.audit,
        )
    else:
        keys.callback()(lambda: None)
    return keys


def _add(group: typer.Typer, **commands: Callable[..., None]) -> None:
    for name, command in commands.items():
        group.command(name)(reported(command))
