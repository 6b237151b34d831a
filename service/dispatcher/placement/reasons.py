"""The reasons why jobs wait, in words for their owners."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from windlass.amounts import GIB
from windlass.service.dispatcher.placement.capacity import BUFFERS, DEVICES, HOST_MEMORY, MachineCapacity
from windlass.service.dispatcher.placement.fleet import JoinedBox
from windlass.service.dispatcher.placement.placement_policy import Option, Placement
from windlass.service.dispatcher.placement.queue_policy import Decision
from windlass.service.validation import count_text, told_jobs_beside
from windlass.storage.ids import HEAD_NAME
from windlass.storage.sql import Job

# Boxes that a reason for waiting names; the others are counted.
_MAX_NAMED = 4
_AMOUNT = re.compile(r"[\d.]+ [KMGTP]?i?B")
# Parts of a reason that change whenever a job on any box begins or ends.
_JOBS = re.compile(
    r"jobs? ftjob-\w+(, ftjob-\w+)*|\d+ jobs? of others|\band\b|[\d.]+|\bqueued jobs? (is|are) before this one"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A job cannot begin yet, whatever room there is. `is_soon`: it can within moments, so that it keeps its room."""

    reason: str
    is_soon: bool = False


@dataclass(slots=True, kw_only=True)
class Placing:
    """Knowledge of a pass over the queue: the boxes and the jobs' options."""

    capacity: MachineCapacity
    num_gpus: Mapping[str, int]  # of each box
    holders: dict[str, list[Job]]  # by box
    options: dict[str, Mapping[str, Option]] = field(default_factory=dict)  # by job and box
    why_not: dict[str, Mapping[str, str]] = field(default_factory=dict)  # by job: why other boxes are no options
    over: dict[str, Sequence[JoinedBox]] = field(default_factory=dict)  # by job over several boxes: the other ones
    waits: dict[str, Wait] = field(default_factory=dict)  # by job that cannot begin yet

    def reason(self, job: Job, placement: Placement, num_before: int) -> str:
        """Explains to its owner why a ready job waits. Other users' jobs are counted, not named."""
        decisions = dict(placement.elsewhere)
        if placement.box is not None:
            decisions = {placement.box: placement.decision, **decisions}
        parts = []
        begins_at = [name for name, decision in decisions.items() if decision.begins]
        if begins_at and placement.box is not None and job.id not in self.over:
            free = told_boxes(begins_at)
            parts.append(f"it would end on box {placement.box} sooner than on {free}, though it has to wait there")
        boxes = [self._why_not_on(job, name, decision) for name, decision in decisions.items() if not decision.begins]
        parts += in_short([*filter(None, boxes), *self.why_not[job.id].values()])
        decision = placement.decision
        if decision.never and len(decisions) == 1:
            return "; ".join(parts)
        holders = self.holders[placement.box or HEAD_NAME]
        of_boxes = decisions.values() if placement.by_pausing else (decision,)
        is_pausing = any(each.pauses or each.will_pause for each in of_boxes)
        if is_pausing or any(other.yields_to == job.id for other in holders):
            parts.append("jobs of lower priority are paused for it after their step")
        if not parts:
            box = job.windlass.get("box")
            parts.append(
                "no box that it may run on has joined" if box is None else f"box {box}, which it asks for, has left"
            )
        if num_before:
            parts.append(f"{num_before} queued job{'s are' if num_before > 1 else ' is'} before this one")
        return "; ".join(parts)

    def _why_not_on(self, job: Job, name: str, decision: Decision) -> str:
        """Explains why a job does not begin on a box. Without other boxes, this one is not named."""
        needs, holders = self.options[job.id][name].needs, self.holders[name]
        is_alone, num_gpus = len(self.num_gpus) == 1, self.num_gpus[name]
        if decision.never:
            lacks = "; ".join(
                _short_of(each, needs[each], lack, num_gpus=num_gpus) for each, lack in decision.missing.items()
            )
            return f"{lacks}, also with no other job here" if is_alone else f"box {name} is too small for it: {lacks}"
        beside = told_jobs_beside([other.id for other in holders if other.owner == job.owner], len(holders))
        parts = []
        for each, lack in decision.missing.items():
            if each == DEVICES and needs[each] == 1:
                devices = "the CPU" if num_gpus == 0 else "every GPU"
                parts.append(f"{devices} {'' if is_alone else f'of box {name} '}is in use by {beside}")
            else:
                where = "" if is_alone else f"on box {name} it "
                parts.append(f"{where}{_short_of(each, needs[each], lack, num_gpus=num_gpus)} beside {beside}")
        if decision.waits_behind is not None:
            where = "there is room for it" if is_alone else f"box {name} has room for it"
            parts.append(f"{where}, but a job before it would have to wait longer")
        return "; ".join(parts)


def sentence(reason: str, *, has_boxes: bool) -> Collection[str]:
    """Returns what makes a reason another one, with an event. The jobs on several boxes change too often for it."""
    if not has_boxes:
        return _AMOUNT.sub("", reason)
    return sorted({_JOBS.sub("", part).strip() for part in reason.split("; ")} - {""})


def told_boxes(names: Sequence[str]) -> str:
    """Lists one or more boxes: "box A", "boxes A, B"."""
    return f"box{'es' if len(names) > 1 else ''} {', '.join(names)}"


def in_short(reasons: Sequence[str]) -> Sequence[str]:
    """Returns the first reasons, and the number of the others."""
    if len(reasons) <= _MAX_NAMED + 1:
        return reasons
    return [*reasons[:_MAX_NAMED], f"and so on for {len(reasons) - _MAX_NAMED} more boxes"]


def _short_of(resource: str, needed: int, lack: int, *, num_gpus: int) -> str:
    """Says how much of a resource a job needs, and how much of it is free."""
    free = max(0, needed - lack)
    if resource == DEVICES:
        devices = count_text(needed, "GPU" if num_gpus else "device")
        return f"needs {devices}; {free} {'is' if free == 1 else 'are'} free"
    where = {HOST_MEMORY: "host memory", BUFFERS: "memory for its buffers"}
    what = where.get(resource, f"space on the SSD {resource}")
    return f"needs {needed / GIB:.1f} GiB of {what}; {free / GIB:.1f} GiB are free"
