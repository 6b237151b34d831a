"""The command `plan`."""

from windlass.service.cli.plan.command import EXIT_DOES_NOT_FIT as EXIT_DOES_NOT_FIT
from windlass.service.cli.plan.command import plan as plan
