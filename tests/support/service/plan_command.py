"""`windlass plan`, as users run it."""

import typer
from typer.testing import CliRunner, Result

from windlass.service.cli.errors import reported
from windlass.service.cli.plan.command import plan

SHAPE = "num_layers: 4\nhidden_size: 256\nnum_heads: 4\nvocab_size: 1000\n"
JOB = ("--batch-size", "4", "--seq-len", "64")


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(reported(plan))
    return CliRunner().invoke(app, arguments)
