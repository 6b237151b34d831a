"""The command line."""

from windlass.service.cli.errors import CommandError as CommandError
from windlass.service.cli.follow import follow_job as follow_job
