"""Compares a job's device memory budget, and the GPU that is there, with its plan, without running the model."""

from windlass.actors.job.context import evaluation_batch_size
from windlass.actors.job.spec import JobSpec
from windlass.amounts import GIB, bytes_text, least_gib
from windlass.engine.memory_plan import PlanError, reserved_nbytes


def require_planned_device_room(spec: JobSpec, *, on_gpu: bool = False, gpu_nbytes: int | None = None) -> None:
    """Checks that the job's device memory budget, and its GPU, cover its plan. Does nothing if the job lacks a plan.

    `on_gpu`: they must also cover what PyTorch's allocator reserves beside the job's tensors. `gpu_nbytes`: the memory
    of the GPU, where it is known.

    Raises:
        PlanError: there is too little, because the plan was made for another budget or GPU, or by an older release.
    """
    planned_nbytes = spec.planned_device_nbytes
    limits = [each for each in (spec.device_memory_nbytes, gpu_nbytes) if each is not None]
    if not limits or planned_nbytes is None:
        return
    needed_nbytes = reserved_nbytes(planned_nbytes) if on_gpu else planned_nbytes
    if needed_nbytes > (limit_nbytes := min(limits)):
        other = "budget" if limit_nbytes == spec.device_memory_nbytes else "GPU"
        is_reserve = planned_nbytes <= limit_nbytes
        what = "with the reserve of PyTorch's allocator" if is_reserve else f"made for another {other}"
        raise too_little_device_memory(spec, limit_nbytes, needed_nbytes, f"by its plan, {what}")


def too_little_device_memory(spec: JobSpec, limit_nbytes: int, needed_nbytes: int, what: str) -> PlanError:
    """Builds the error of a job whose device memory budget, or whose GPU, is too small.

    `what` describes what needs the memory. A limit that is not the budget is the GPU's memory.
    """
    hyper, budget_nbytes = spec.training, spec.device_memory_nbytes
    size, least = evaluation_batch_size(spec), least_gib(needed_nbytes)
    others = [f"sequence_length (now {hyper.sequence_length}) to less"]
    if size > 1:
        others.insert(0, f"num_microbatches (now {hyper.num_microbatches}, of up to {size} examples) to more")
    if limit_nbytes == budget_nbytes:
        limit = f"its budget of {bytes_text(limit_nbytes)}"
        first = f"gpu_memory_gib, in the job's budgets and in the settings, to at least {least}"
    else:
        beyond = "" if budget_nbytes is None else f", which its budget of {bytes_text(budget_nbytes)} exceeds"
        limit = f"its GPU has: {bytes_text(limit_nbytes)}{beyond}"
        first = f"gpu_memory_gib to at most {_most_gib(limit_nbytes)}"
    return PlanError(
        f"the job needs {bytes_text(needed_nbytes)} of device memory ({what}), "
        f"{bytes_text(needed_nbytes - limit_nbytes)} more than {limit}; set {first}, or {', or '.join(others)}",
        param="windlass.budgets.gpu_memory_gib",
    )


def _most_gib(nbytes: int) -> str:
    return f"{nbytes * 100 // GIB / 100:g}"
