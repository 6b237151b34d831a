"""The start of an attempt, which is the same under Ray and in one process."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from windlass.actors.job import (
    JobContext,
    JobSpec,
    SsdFacts,
    arena_free_nbytes,
    gpu_worker_name,
    make_context,
    optimizer_name,
    param_server_name,
    require_planned_device_room,
    require_room,
    ssd_name,
    survey_ssds,
)
from windlass.amounts import bytes_text
from windlass.engine.model import ModelLayout
from windlass.storage.ids import ActorName, Step
from windlass.storage.integrity import StoreError
from windlass.storage.memory import Arena, InsufficientSpaceError, RoomLostError, arena_path, remove_leftovers
from windlass.storage.store import (
    DECISIONS_FILE,
    CommitRecord,
    DecisionLog,
    Recovery,
    StoreJournal,
    last_decision,
    recover,
)

# What a starting attempt waits for in a call of its actors, by the method; see `DuringWait`.
_CALLED = {
    "open_space": "Opening the job's tensor stores on the SSDs",
    "start": "The job's processes open their files and devices",
}

# Called again and again during the waits of a starting attempt, with what it waits for in words for its user. It
# raises an error if the attempt is to stop.
DuringWait = Callable[[str], None]

START_DEADLINE_S = 120.0  # seconds until processes must have started and answered a call
# Seconds until workers must have started. It is long because a worker may compile kernels, or wait for another process
# that compiles them.
WORKER_DEADLINE_S = 1500.0

# For a job whose arena no longer fits. Its own processes have started since the check.
_ADVICE_ON_LOSS = (
    "there was enough when the attempt began: other programs, or the job's own processes, have taken it since; lower "
    "the job's host memory budget, close other programs, or give the machine or the container more memory"
)


class CallActors(Protocol):
    """Calls a method of several actors with the same arguments, and returns the results by actor."""

    def __call__(
        self, names: Sequence[ActorName], method: str, *arguments: object, deadline_s: float = START_DEADLINE_S
    ) -> dict[ActorName, Any]: ...


def waits_for(method: str) -> str:
    """Returns what an attempt waits for while its actors carry out a method of their start, for the job's user."""
    return _CALLED.get(method, "Starting the job's processes")


def worker_names(spec: JobSpec) -> list[ActorName]:
    """Returns the names of the actors on the specification's box, without the scheduler and the link."""
    optimizers = [optimizer_name(index, spec.box) for index in range(spec.num_cpu_optimizers)]
    param_server = [param_server_name(spec.box)] if spec.num_ranks > 1 else []
    gpu_workers = [gpu_worker_name(rank, spec.box) for rank in range(spec.num_ranks)]
    return [*_server_names(spec), *optimizers, *param_server, *gpu_workers]


def node_of_all(nodes: Iterable[int | None]) -> int | None:
    """Returns the NUMA node near all of a job's GPUs, or None if they are near different ones."""
    different = set(nodes)
    return different.pop() if len(different) == 1 else None


def free_memory_of(spec: JobSpec) -> int:
    """Returns the bytes of host memory for an arena, after the arenas of killed attempts are removed."""
    remove_leftovers(Path(spec.arena_dir))
    return arena_free_nbytes(spec)


def plan_attempt(
    spec: JobSpec,
    layout: ModelLayout,
    *,
    direct: bool = True,
    ssds: tuple[SsdFacts, ...] | None = None,
    free_nbytes: int | None = None,
) -> JobContext:
    """Plans the attempt, and checks that there is space for it.

    Without `ssds`, the SSDs' stored measurements are used, or new ones are made. `direct=False` is for file systems
    without O_DIRECT. `free_nbytes`: of `free_memory_of`, which is called without.

    Raises:
        PlanError, InsufficientSpaceError: the job does not fit the machine.
    """
    path = arena_path(Path(spec.arena_dir), spec.job, spec.attempt)
    ssds = ssds or survey_ssds(spec, direct=direct)
    free_nbytes = free_memory_of(spec) if free_nbytes is None else free_nbytes
    context = make_context(spec, layout, str(path), ssds, free_nbytes=free_nbytes)
    require_planned_device_room(spec)
    require_room(context, direct=direct)
    return context


def create_arena(context: JobContext, node: int | None, during_wait: DuringWait = lambda _: None) -> Arena:
    """Creates the arena of an attempt. `node` is the NUMA node near the job's GPUs, on a machine with several.

    Raises:
        RoomLostError: the room that there was at the planning is gone.
    """
    nbytes = context.plan.arena_nbytes
    check_stop = functools.partial(during_wait, f"Allocating {bytes_text(nbytes)} of host memory")
    try:
        return Arena.create(context.arena_path, nbytes, node=node, check_stop=check_stop)
    except InsufficientSpaceError as error:
        raise RoomLostError(error.what, error.path, error.needed_nbytes, error.free_nbytes, _ADVICE_ON_LOSS) from error


def start_actors(specs: Sequence[JobSpec], call: CallActors) -> CommitRecord | None:
    """Starts the actors of an attempt. Returns the commit from which the job resumes; None: it begins.

    `specs`: those of the job's boxes, the lead box's first.

    Every actor starts from the last commit that all SSDs have in common, so all of them are read first. `read_journal`
    does so without a change: while an SSD is missing, starts leave no trace, however many there are. `open_space`
    fences older attempts and returns the commits again, because such an attempt may have committed until then. `start`
    starts an actor from a commit.

    Raises:
        StoreCorrupt: an SSD lacks a commit that all had.
    """
    lead = specs[0]  # its folder has the log
    servers = [name for spec in specs for name in _server_names(spec)]
    recovery_of(lead, call(servers, "read_journal").values())
    # The log is read after the fences: an older attempt's later decision is on a commit that these journals have.
    recovery = recovery_of(lead, call(servers, "open_space").values())
    commit = recovery.resume_from
    decide(lead, recovery)
    call(servers, "start", commit)
    others = [name for spec in specs for name in worker_names(spec) if name not in servers]
    call(others, "start", commit, deadline_s=WORKER_DEADLINE_S)
    return commit


def _server_names(spec: JobSpec) -> Sequence[ActorName]:
    return [ssd_name(index, spec.box) for index in range(len(spec.ssd_dirs))]


def recovery_of(lead: JobSpec, journals: Iterable[StoreJournal]) -> Recovery:
    """Returns the commit from which a job resumes. `lead`: its specification on the box with the log of decisions.

    Raises:
        StoreCorrupt: an SSD lacks a commit that all had.
        StoreError: the job's blocks have been moved to other boxes, or are yet to be.
    """
    decision = last_decision(decisions_path(lead))
    if decision is not None and decision.epoch != lead.layout_epoch:
        raise StoreError(
            f"job {lead.job}: its states are those of layout epoch {decision.epoch}, and this attempt is of epoch "
            f"{lead.layout_epoch}: the blocks were moved to other boxes meanwhile, or are not yet moved"
        )
    return recover(tuple(journals), decision, last_checkpoint=_last_checkpoint(lead))


def decide(lead: JobSpec, recovery: Recovery) -> None:
    """Appends the decision of a recovery to the job's log, if there is one to append. It is durable at the return."""
    if recovery.decision is not None:
        with contextlib.closing(DecisionLog(decisions_path(lead))) as log:
            log.append(recovery.decision)


def decisions_path(lead: JobSpec) -> Path:
    """Returns the path of a job's log of decisions, on its first box."""
    return Path(lead.job_dir) / DECISIONS_FILE


def _last_checkpoint(spec: JobSpec) -> Step | None:
    """Returns the step of the last checkpoint that still exists, None without one."""
    model = Path(spec.output_dir)
    steps = (path.name.removeprefix(f"{model.name}-step-") for path in model.parent.glob(f"{model.name}-step-*"))
    return max((Step(int(step)) for step in steps if step.isdigit()), default=None)
