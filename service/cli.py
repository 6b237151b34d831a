"""The command `windlass`."""

import typer

from windlass.service import cli_jobs, cli_plan, cli_service
from windlass.service.cli_errors import reported

_COMMANDS = (
    cli_service.up,
    cli_service.down,
    cli_service.status,
    cli_service.doctor,
    cli_plan.plan,
    cli_jobs.submit,
    cli_jobs.jobs,
    cli_jobs.show,
    cli_jobs.logs,
    cli_jobs.pause,
    cli_jobs.resume,
    cli_jobs.cancel,
    cli_jobs.files,
    cli_jobs.models,
    cli_jobs.export,
)


def main() -> None:
    """Run the command line."""
    app = typer.Typer(
        name="windlass",
        help="Fine-tune models far larger than the GPU, on boxes you own.",
        no_args_is_help=True,
        add_completion=False,
        # Errors stay short, and tracebacks hide no frames.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for command in _COMMANDS:
        app.command()(reported(command))
    app()
