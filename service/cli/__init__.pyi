"""The command line."""

from windlass.service.cli.commands import main as main
from windlass.service.cli.errors import CommandError as CommandError
from windlass.service.cli.errors import OptionError as OptionError
from windlass.service.cli.follow import follow_job as follow_job
from windlass.service.cli.service import Home as Home
from windlass.service.cli.table import print_columns as print_columns
