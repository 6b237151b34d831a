"""`/v1/boxes` and `/v1/join_codes`: the boxes of the service, and how further ones join."""

import time

from fastapi import APIRouter

from windlass.service.api import AuditDep, CallerDep, Context, ContextDep
from windlass.service.api.routes.boxes.overview import BoxView, view_boxes
from windlass.service.api.schemas import (
    BoxDevices,
    BoxFactsObject,
    BoxFinding,
    BoxGpu,
    BoxJobs,
    BoxList,
    BoxMemory,
    BoxObject,
    BoxSsd,
    BoxVersions,
    ClusterAddress,
    JobsOnBox,
    JoinCodeObject,
)
from windlass.service.auth import Caller
from windlass.service.cluster.authority import join_commands, new_join_code
from windlass.service.installation import Settings, node_of
from windlass.service.machine.fleet import BoxFacts
from windlass.service.validation import ApiError
from windlass.storage.ids import HEAD_NAME
from windlass.storage.sql import Box, NotFound
from windlass.storage.sql.repositories import HEAD_ID, BoxRepository, BoxState, Role

router = APIRouter(prefix="/v1")


@router.get("/boxes")
def list_boxes(context: ContextDep, caller: CallerDep, with_removed: bool = False) -> BoxList:
    """Returns the head and all boxes, with what is free and what runs and waits on each.

    Removed boxes are left out unless they hold states of unfinished jobs, or `with_removed` is true.
    """
    here = context.facts.read()
    with context.database.read() as session:
        views = view_boxes(session, context.settings, here, with_removed=with_removed)
        data = [_shown(view, here, caller) for view in views]
    return BoxList(data=data, windlass=ClusterAddress(cluster_address=_cluster_address(context.settings)))


@router.get("/boxes/{name}")
def retrieve_box(context: ContextDep, caller: CallerDep, name: str) -> BoxObject:
    """Returns a box."""
    return _retrieve(context, caller, name)


@router.post("/boxes/{name}/drain")
def drain_box(context: ContextDep, caller: CallerDep, audit: AuditDep, name: str) -> BoxObject:
    """Gives a box no more jobs. Its attempts end at a commit, and its jobs wait there until it is resumed."""
    return _set_state(context, caller, audit, name, BoxState.DRAINING)


@router.post("/boxes/{name}/resume")
def resume_box(context: ContextDep, caller: CallerDep, audit: AuditDep, name: str) -> BoxObject:
    """Uses a drained box again."""
    return _set_state(context, caller, audit, name, BoxState.READY)


@router.post("/boxes/{name}/remove")
def remove_box(context: ContextDep, caller: CallerDep, audit: AuditDep, name: str) -> BoxObject:
    """Removes a box: from now on its calls are refused.

    Its jobs that have not begun go back to the queue. Those that have begun wait until a person starts them elsewhere.
    """
    _check_admin(caller)
    with context.database.write() as session:
        boxes = BoxRepository(session)
        box = _named(boxes, name, head=node_of(context.settings.home))
        if box.state != BoxState.REMOVED.value:
            boxes.remove(box.id, head=node_of(context.settings.home))
        audit(session, name)
    return _retrieve(context, caller, name)


@router.post("/join_codes")
def create_join_code(context: ContextDep, caller: CallerDep, audit: AuditDep) -> JoinCodeObject:
    """Makes a code with which one box may join. Only this answer contains it."""
    _check_admin(caller)
    address = _cluster_address(context.settings)
    if address is None:
        raise ApiError(
            "this service is not open to other boxes; end it with `windlass down`, and start it with `windlass up "
            "--cluster-host IP`, where IP is an address of this machine that they reach",
            code="no_cluster_host",
        )
    with context.database.write() as session:
        code = new_join_code(context.settings, session)
        expires_at = BoxRepository(session).last_code_expires_at()
        audit(session, None)
    return JoinCodeObject(
        code=code,
        created_at=int(time.time()),
        expires_at=int(expires_at),
        cluster_address=address,
        commands=join_commands(context.settings, code),
    )


def _set_state(context: Context, caller: Caller, audit: AuditDep, name: str, state: BoxState) -> BoxObject:
    _check_admin(caller)
    with context.database.write() as session:
        boxes = BoxRepository(session)
        boxes.set_state(_present(boxes, name, head=node_of(context.settings.home)).id, state)
        audit(session, name)
    return _retrieve(context, caller, name)


def _retrieve(context: Context, caller: Caller, name: str) -> BoxObject:
    here = context.facts.read()
    with context.database.read() as session:
        for view in view_boxes(session, context.settings, here, with_removed=True):
            if view.name == name:
                return _shown(view, here, caller)
    raise NotFound("box", name)


def _check_admin(caller: Caller) -> None:
    if caller.role is not Role.ADMIN:
        raise ApiError("changing boxes is for admins", status=403, code="permission_denied")


def _named(boxes: BoxRepository, name: str, *, head: str) -> Box:
    if name == HEAD_NAME:
        raise ApiError(
            "the head is the service itself, so it is neither drained nor removed; pause its jobs, or end the service "
            "with `windlass down`",
            code="box_is_head",
        )
    box = boxes.by_name(name)
    if box is None or box.head != head:
        raise NotFound("box", name)
    return box


def _present(boxes: BoxRepository, name: str, *, head: str) -> Box:
    """Returns a box that was not removed. Raises ApiError or NotFound."""
    box = _named(boxes, name, head=head)
    if box.state == BoxState.REMOVED.value:
        raise ApiError(f"box {name} was removed; it can join again with a new code", code="box_removed")
    return box


def _cluster_address(settings: Settings) -> str | None:
    if settings.cluster_host is None:
        return None
    host = settings.cluster_host
    return f"[{host}]:{settings.cluster_port}" if ":" in host else f"{host}:{settings.cluster_port}"


def _shown(view: BoxView, head: BoxFacts, caller: Caller) -> BoxObject:
    row, facts = view.row, view.facts
    is_away = view.is_away and not view.is_removed
    return BoxObject(
        id=HEAD_ID if row is None else row.id,
        name=view.name,
        is_head=row is None,
        state="removed" if view.is_removed else "away" if is_away else "draining" if view.is_draining else "ready",
        is_draining=view.is_draining,
        state_since=None if row is None or row.state_at is None else int(row.state_at),
        away_since=int(row.seen_at) if row is not None and is_away else None,
        address=None if row is None else row.address,
        joined_at=None if row is None else int(row.joined_at),
        seen_at=int(time.time() if row is None else row.seen_at),
        devices=_devices(view),
        memory=BoxMemory(
            total_bytes=0 if facts is None else facts.memory_nbytes,
            free_bytes=view.free_memory_nbytes,
        ),
        ssds=[BoxSsd.of(ssd) for ssd in view.ssds],
        link_host=None if facts is None else facts.link_host,
        link_bytes_per_s=None if facts is None else facts.link_bytes_per_s,
        versions=None if facts is None else BoxVersions.of(facts),
        unequal_versions=[] if facts is None else _unequal(facts, head),
        findings=[BoxFinding(text=finding.text, is_problem=finding.is_problem) for finding in facts.findings]
        if facts is not None
        else [],
        facts=None if facts is None else _facts(facts),
        jobs=BoxJobs(
            running=JobsOnBox.of(view.running, caller.only_of),
            waiting=JobsOnBox.of(view.waiting, caller.only_of),
            paused=JobsOnBox.of(view.paused, caller.only_of),
        ),
    )


def _devices(view: BoxView) -> BoxDevices:
    total, used = view.num_devices, view.num_used_devices
    is_gpu = view.facts is not None and view.facts.num_gpus > 0
    return BoxDevices(kind="gpu" if is_gpu else "cpu", total=total, used=used, free=max(0, total - used))


def _facts(facts: BoxFacts) -> BoxFactsObject:
    gpus = [BoxGpu(name=gpu.name, memory_bytes=gpu.memory_nbytes) for gpu in facts.gpus]
    return BoxFactsObject(num_cores=facts.num_cores, gpus=gpus, hardware=facts.hardware)


def _unequal(facts: BoxFacts, head: BoxFacts) -> list[str]:
    mine, heads = BoxVersions.of(facts).model_dump(), BoxVersions.of(head).model_dump()
    return [name for name, version in mine.items() if version != heads[name]]
