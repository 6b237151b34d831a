"""Plans of jobs that do not exist yet, for `windlass plan` and the API, and the settings of a job with such a plan."""

from pathlib import Path
from typing import Any

from windlass.engine.training_config import TrainingConfig
from windlass.planner.hardware import Hardware
from windlass.planner.question import PlanReport, PlanRequest
from windlass.service.installation import Settings
from windlass.service.jobs.machine_resources import MachineResources, most_gpus_of
from windlass.service.jobs.spec_builder import plan_request
from windlass.service.validation import (
    JobSettings,
    SupervisedHyperparameters,
    WindlassSettings,
    hypothetical_config,
    planned_steps,
)


def hypothetical_request(
    settings: Settings,
    hardware: Hardware,
    resources: MachineResources | None,
    *,
    model_dir: Path,
    asked: WindlassSettings,
    batch_size: int,
    sequence_length: int,
    num_validation_examples: int = 0,
    has_gpus: bool = False,
    is_alone: bool = False,
) -> PlanRequest:
    """Makes the request that a job's preparation would make if all examples had `sequence_length` tokens.

    See `plan_request` for the arguments. Raises ValueError for what a job's settings refuse.
    """
    most_microbatches = min(asked.num_microbatches or batch_size, batch_size)
    most = asked.with_most_gpus(most_gpus_of(hardware, resources), most_microbatches)
    training = hypothetical_config(
        most,
        batch_size=batch_size,
        # Of an open number this is only the start of the search.
        num_microbatches=asked.num_microbatches or min(max(most.num_lanes, most.least_gpus), batch_size),
        sequence_length=sequence_length,
    )
    return plan_request(
        settings,
        hardware,
        resources,
        model_dir=model_dir,
        asked=asked,
        training=training,
        num_validation_examples=num_validation_examples,
        has_gpus=has_gpus,
        is_alone=is_alone,
    )


def settings_of_plan(asked: WindlassSettings, training: TrainingConfig, report: PlanReport) -> dict[str, Any] | None:
    """Returns the settings of a job with this plan, for the object `windlass` of its request.

    `asked`, `training`: the settings and the config that the plan was made for. Returns None if nothing fits, or if no
    job can be so large.
    """
    if report.choices is None:
        return None
    values = asked.model_dump(mode="json", exclude_unset=True) | {
        "batch_size": training.batch_size,
        "num_microbatches": report.choices["num_microbatches"],
        "sequence_length": training.sequence_length,
        "lanes": training.lanes,
    }
    if (cut := report.choices.get("cut_matrices")) is not None:  # without one, the job's own plan has none, either
        values["cut_matrices"] = cut
    try:
        windlass = WindlassSettings.model_validate(values)
        JobSettings(supervised=SupervisedHyperparameters(), windlass=windlass, seed=0)
    except ValueError:
        return None
    return {name: values[name] for name in WindlassSettings.model_fields if name in values}


def totals_of_job(
    asked: WindlassSettings,
    report: PlanReport,
    *,
    batch_size: int,
    num_examples: int | None,
    num_ssds: int,
    rated_tb: float | None,
) -> dict[str, Any]:
    """Returns the steps of a job on so many examples.

    `num_steps` is their number, `job_s` their seconds, and `ssd_write_tb` the terabytes (10^12 bytes) that they write
    to all SSDs together. `ssd_endurance_percent` is the part that this is of `rated_tb`, the least terabytes that one
    of the SSDs is rated for. Loading and evaluations are left out. All are None if the number of examples is not known;
    those but the first also if nothing fits, and the last if `rated_tb` is None.
    """
    number = None if num_examples is None else planned_steps(asked, batch_size=batch_size, num_examples=num_examples)
    step_s, step_gb = report.step_s, report.ssd_write_gb_per_step
    written_tb = None if number is None or step_gb is None else number * step_gb / 1000
    return {
        "num_steps": number,
        "job_s": None if number is None or step_s is None else number * step_s,
        "ssd_write_tb": written_tb,
        "ssd_endurance_percent": None
        if written_tb is None or rated_tb is None
        else 100 * written_tb / num_ssds / rated_tb,
    }
