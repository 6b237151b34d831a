"""The command `windlass`."""

import os
import sys

import typer

from windlass.service.cli import plan as cli_plan
from windlass.service.cli.errors import PlainGroup, reported


def main() -> None:
    """Runs the command line."""
    os.umask(0o077)  # only the owner may read models, data and keys
    app = typer.Typer(
        name="windlass",
        cls=PlainGroup,
        help="Fine-tune models far larger than the GPU, on boxes you own.",
        no_args_is_help=True,
        add_completion=False,
        # Errors stay short, and tracebacks show all frames.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    if sys.argv[1:2] == ["plan"]:  # alone, because the others load libraries that a plan does not wait for
        app.callback()(lambda: None)  # else the only command would have no name
        app.command()(reported(cli_plan.plan))
    else:
        from windlass.service.cli.every_command import add_commands

        add_commands(app)
    app()
