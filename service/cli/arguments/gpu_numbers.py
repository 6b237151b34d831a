"""The number of GPUs in commands: a number, or "auto"."""

from typing import Any

import typer


def gpus_option(help_: str) -> Any:
    """Returns an option for a number of GPUs or "auto". The service checks the maximum."""
    return typer.Option(help=help_, parser=_auto_or_number, metavar="NUMBER|auto")


def gpus_in_words(job_extra: dict[str, Any]) -> str | None:
    """Describes a job's GPUs, or returns None if it has one, as asked for. `job_extra`: its object `windlass`."""
    asked = job_extra["settings"].get("gpus", 1)
    if asked != "auto":
        return str(asked) if asked > 1 else None
    chosen = (job_extra["hyperparameters"] or {}).get("gpus")
    return "auto: the plan chooses" if chosen is None else f"{chosen} (auto)"


def busy_gpus_in_words(metrics: dict[str, Any] | None) -> str | None:
    """Describes the share of the last step in which each of several GPUs computed; None for one GPU."""
    timeline = (metrics or {}).get("timeline") or {}
    computing = {
        resource.removesuffix("/compute"): seconds
        for resource, seconds in timeline.get("busy_s", {}).items()
        if resource.endswith("/compute")
    }
    if len(computing) < 2 or not timeline.get("period_s"):
        return None
    shares = (f"{worker} {seconds / timeline['period_s']:.0%}" for worker, seconds in sorted(computing.items()))
    return ", ".join(shares)


def _auto_or_number(value: str | int) -> int | str:
    if value == "auto":
        return value
    try:
        number = int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a number nor auto") from None
    if number < 1:
        raise typer.BadParameter(f"{number} is less than 1")
    return number
