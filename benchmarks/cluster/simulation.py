"""A simulation of the queue: jobs come, begin where a policy says, and end."""

import heapq
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.cluster.workload import SimulatedBox, SimulatedJob, Workload
from windlass.service.dispatcher.placement import Amounts, BoxState, Candidate, Holder, Option, Turn, in_turn, place

# Jobs that begin: the job, and the name of its box.
Begins = Sequence[tuple[SimulatedJob, str]]


@dataclass(slots=True)
class World:
    """The boxes and jobs at one moment."""

    workload: Workload
    now_s: float = 0.0
    waiting: list[SimulatedJob] = field(default_factory=list)
    running: dict[str, tuple[SimulatedJob, str, float]] = field(default_factory=dict)  # with box and start, by id
    last_began: dict[str | None, float] = field(default_factory=dict)  # by owner
    waits_for: dict[str, str | None] = field(default_factory=dict)  # by job
    passed_since: dict[str, float] = field(default_factory=dict)  # by job: when it first waited beside a free box
    num_idle: int = 0  # pairs of an idle box and a waiting job that it should have begun
    decision_s: list[float] = field(default_factory=list)

    def on(self, box: SimulatedBox) -> Sequence[tuple[SimulatedJob, float]]:
        """Returns the jobs on a box with their starts."""
        return [(job, start_s) for job, name, start_s in self.running.values() if name == box.name]

    def in_turn(self) -> Sequence[SimulatedJob]:
        """Returns the waiting jobs in the order of the queue."""
        turns = [
            Turn(job_id=job.id, owner=job.owner, priority=job.priority, created_at=job.arrives_s)
            for job in self.waiting
        ]
        by_id = {job.id: job for job in self.waiting}
        num_running: Counter[str | None] = Counter(job.owner for job, _, _ in self.running.values())
        return [by_id[job_id] for job_id in in_turn(turns, num_running, self.last_began)]


Policy = Callable[[World], Begins]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The waits and ends of all jobs."""

    wait_s: Sequence[float]
    turnaround_s: Sequence[float]  # from arrival to end
    num_idle: int
    decision_s: Sequence[float]
    ends_s: float

    @property
    def mean_wait_s(self) -> float:
        """The mean time from a job's arrival to its begin."""
        return statistics.fmean(self.wait_s)

    @property
    def mean_turnaround_s(self) -> float:
        """The mean time from a job's arrival to its end."""
        return statistics.fmean(self.turnaround_s)


def simulate(workload: Workload, policy: Policy) -> Outcome:
    """Runs all jobs. Raises RuntimeError if one never begins."""
    world = World(workload)
    coming, ends = list(reversed(workload.jobs)), list[tuple[float, str]]()
    wait_s, turnaround_s = dict[str, float](), dict[str, float]()
    while coming or ends:
        world.now_s = min(coming[-1].arrives_s if coming else float("inf"), ends[0][0] if ends else float("inf"))
        while ends and ends[0][0] <= world.now_s:
            _, job_id = heapq.heappop(ends)
            job, _, _ = world.running.pop(job_id)
            turnaround_s[job_id] = world.now_s - job.arrives_s
        while coming and coming[-1].arrives_s <= world.now_s:
            world.waiting.append(coming.pop())
        began = time.perf_counter()
        begins = policy(world)
        world.decision_s.append(time.perf_counter() - began)
        for job, name in begins:
            world.waiting.remove(job)
            world.running[job.id] = (job, name, world.now_s)
            world.last_began[job.owner] = world.now_s
            wait_s[job.id] = world.now_s - job.arrives_s
            heapq.heappush(ends, (world.now_s + workload.by_name[name].run_s(job) * job.error, job.id))
    if world.waiting:
        raise RuntimeError(f"{len(world.waiting)} jobs never began")
    return Outcome(
        wait_s=list(wait_s.values()),
        turnaround_s=list(turnaround_s.values()),
        num_idle=world.num_idle,
        decision_s=world.decision_s,
        ends_s=world.now_s,
    )


def by_windlass(world: World) -> Begins:
    """Decides by the policy of windlass, and counts the boxes that it leaves idle while a job waits that fits them."""
    boxes = world.workload.boxes
    states = [
        BoxState(
            name=box.name,
            has=has_of(box),
            holders=[Holder(job_id=job.id, takes=needs_of(job)) for job, _ in world.on(box)],
            left_s={job.id: max(0.0, start_s + box.run_s(job) - world.now_s) for job, start_s in world.on(box)},
        )
        for box in boxes
    ]
    queued = world.in_turn()
    candidates = [
        Candidate(
            job_id=job.id,
            options=[Option(box=box.name, needs=needs_of(job), run_s=box.run_s(job)) for box in boxes if box.fits(job)],
            priority=job.priority,
            waits_for=world.waits_for.get(job.id),
            passed_s=world.now_s - world.passed_since.get(job.id, world.now_s),
        )
        for job in queued
    ]
    placements = place(states, candidates)
    world.waits_for = {each.job_id: each.box for each in placements}
    for each in placements:
        if each.passes:
            world.passed_since.setdefault(each.job_id, world.now_s)
    begins = [
        (job, each.box)
        for job, each in zip(queued, placements, strict=True)
        if each.decision.begins and each.box is not None
    ]
    used = {name for _, name in begins} | {name for _, name, _ in world.running.values()}
    for box in boxes:
        if box.name not in used:
            for job, each in zip(queued, placements, strict=True):
                ends_sooner = each.end_s is not None and each.box != box.name and each.end_s < box.run_s(job)
                world.num_idle += box.fits(job) and not (each.decision.begins or ends_sooner)
    return begins


def by_first_fit(world: World) -> Begins:
    """Begins each job, in the order of the queue, on the first box that has room for it."""
    begins = list[tuple[SimulatedJob, str]]()
    taken = {box.name: Counter[str]() for box in world.workload.boxes}
    for job, name, _ in world.running.values():
        taken[name].update(needs_of(job))
    for job in world.in_turn():
        for box in world.workload.boxes:
            has, needs = has_of(box), needs_of(job)
            if all(taken[box.name][each] + needs[each] <= has[each] for each in needs):
                taken[box.name].update(needs)
                begins.append((job, box.name))
                break
    return begins


def has_of(box: SimulatedBox) -> Amounts:
    """Returns a box's resources."""
    return {"devices": box.num_devices, "memory": box.memory_gib, "ssd": box.ssd_gib}


def needs_of(job: SimulatedJob) -> Amounts:
    """Returns a job's needs."""
    return {"devices": job.gpus, "memory": job.memory_gib, "ssd": job.ssd_gib}
