"""The command `plan`."""

from windlass.service.cli.plan.command import plan as plan
