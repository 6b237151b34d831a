"""Compares a job's device memory budget with its plan, without running the model."""

from windlass.actors.job.context import evaluation_batch_size
from windlass.actors.job.spec import JobSpec
from windlass.amounts import bytes_text, least_gib
from windlass.engine.memory_plan import PlanError, reserved_nbytes


def require_planned_device_room(spec: JobSpec, *, on_gpu: bool = False) -> None:
    """Checks that the job's device memory budget covers its plan. Does nothing if the job lacks a budget or a plan.

    `on_gpu`: it must also cover what PyTorch's allocator reserves beside the job's tensors.

    Raises:
        PlanError: the budget is too small, because the plan was made for another budget, or by an older release.
    """
    limit_nbytes, planned_nbytes = spec.device_memory_nbytes, spec.planned_device_nbytes
    if limit_nbytes is None or planned_nbytes is None:
        return
    needed_nbytes = reserved_nbytes(planned_nbytes) if on_gpu else planned_nbytes
    if needed_nbytes > limit_nbytes:
        is_reserve = planned_nbytes <= limit_nbytes
        what = "with the reserve of PyTorch's allocator" if is_reserve else "made for another budget"
        raise too_little_device_memory(spec, limit_nbytes, needed_nbytes, f"by its plan, {what}")


def too_little_device_memory(spec: JobSpec, limit_nbytes: int, needed_nbytes: int, what: str) -> PlanError:
    """Builds the error of a job whose device memory budget is too small. `what` describes what needs the memory."""
    hyper = spec.training
    size, least = evaluation_batch_size(spec), least_gib(needed_nbytes)
    others = [f"sequence_length (now {hyper.sequence_length}) to less"]
    if size > 1:
        others.insert(0, f"num_microbatches (now {hyper.num_microbatches}, of up to {size} examples) to more")
    return PlanError(
        f"the job needs {bytes_text(needed_nbytes)} of device memory ({what}), "
        f"{bytes_text(needed_nbytes - limit_nbytes)} more than its budget of {bytes_text(limit_nbytes)}; set "
        f"gpu_memory_gib, in the job's budgets and in the settings, to at least {least}, or {', or '.join(others)}",
        param="windlass.budgets.gpu_memory_gib",
    )
