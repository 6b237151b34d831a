"""Gives queued jobs to other boxes, and takes those back that a box did not take before it was away."""

import logging
from collections.abc import Sequence

from windlass.service.dispatcher.placement.fleet import JoinedBox
from windlass.service.installation import Settings, about
from windlass.service.jobs import plan_for_box, plan_for_here
from windlass.storage.sql import Box, Database, Job, JobStatus, StatusConflict
from windlass.storage.sql.repositories import (
    BoxRepository,
    BoxState,
    JobRepository,
    MirrorRepository,
    is_away,
)

_LOG = logging.getLogger(__name__)
_TAKEN_BACK = "its turn again, because box {name}, to which it was given, is away and has not taken it"


def hand_over(database: Database, settings: Settings, job: Job, box: JoinedBox) -> None:
    """Gives a job that never began to a box. The box's state and the job are read again in the same transaction.

    Raises StatusConflict if the box gets no jobs any more, or the job has changed; it then stays here.
    """
    assert job.attempt == 0, "the states of a job that began stay where they are"
    plan_for_box(settings, job, box.kind)  # before the row says so, because the box fetches it at once
    try:
        with database.write() as session:
            boxes = BoxRepository(session)
            row = boxes.get(box.id)
            if row.state != BoxState.READY.value or is_away(row):
                raise StatusConflict(job.id, f"given to box {box.name}", f"not: the box is {row.state} or away")
            MirrorRepository(session).give_away(job, row, message=f"is being copied to box {box.name}")
            JobRepository(session).set_fields(job.id, plan_number=0)
    except BaseException:
        plan_for_here(settings, job)
        raise
    _LOG.info("given to box %s", box.name, extra=about(job.id))


def take_back(database: Database, settings: Settings, node: str, absent: Sequence[Box]) -> None:
    """Takes jobs back that were given to a box which is `absent`, away or removed, and has not taken them.

    A box has taken a job once the service has read its confirmation, which removes the instruction. Before that, a box
    must not begin the job. So a job is never on two boxes, also if the box has carried out the instruction meanwhile.
    The box then reports a job that is not its own, and is told to discard it.
    """
    nodes = {box.node: box for box in absent}
    with database.read() as session:
        jobs = JobRepository(session).held_by(nodes)
    for job in jobs:
        if job.status is not JobStatus.QUEUED or job.attempt:
            continue
        name = nodes[job.node or ""].name
        with database.write() as session:
            if not MirrorRepository(session).take_back(job.id, node):
                continue  # the box has it
            plan_for_here(settings, job)  # in the transaction, because the job may begin here as soon as it ends
            rows = JobRepository(session)
            rows.set_fields(job.id, plan_number=0)
            rows.set_waiting_reason(job.id, _TAKEN_BACK.format(name=name))
        _LOG.info("taken back from box %s", name, extra=about(job.id))
