"""The command line."""

from windlass.service.cli.commands import main as main
from windlass.service.cli.errors import CommandError as CommandError
from windlass.service.cli.follow import follow_job as follow_job
