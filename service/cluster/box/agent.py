"""The agent of a box: it calls the head every second, carries out its instructions, and reports its jobs.

It keeps nothing that counts in memory. What it has done follows from the box's database, the home, and the cursors that
the head tells. So it may be killed at any time, and an answer may be lost.
"""

import hashlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from windlass.service.cluster.box.connection import (
    BoxRemoved,
    HeadConnection,
    HeadRefused,
    HeadUnreachable,
    membership_of,
)
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.cluster.box.link_upkeep import LinkUpkeep
from windlass.service.cluster.box.parts import Parts
from windlass.service.cluster.box.probes import Probes
from windlass.service.cluster.box.transfers import Sendings, Takings
from windlass.service.data import deletion
from windlass.service.dispatcher import read_capacity
from windlass.service.installation import Settings, about, node_of
from windlass.service.jobs import MachineResources
from windlass.service.machine.fleet import (
    MOST_JOBS,
    BoxFacts,
    CapacityReport,
    FactsHere,
    InstructionMessage,
    Silence,
    SsdSpaceReport,
    SyncReply,
    SyncRequest,
    link_name,
    model_name,
    note_answer,
    read_silence,
    write_hold,
)
from windlass.storage.files import write_atomically
from windlass.storage.sql import TERMINAL_STATUSES, Database, Job, JobPart, NotFound
from windlass.storage.sql.repositories import (
    BoxState,
    FileRepository,
    Instruction,
    JobReport,
    MirrorRepository,
)

_LOG = logging.getLogger(__name__)

# Seconds between calls; the second while there is news.
_INTERVAL_S = 1.0
_SHORT_INTERVAL_S = 0.2
# Longest pause between calls while the head does not answer. The pause doubles each time.
_MAX_PAUSE_S = 8.0
# Seconds between the tellings of what is free, and of facts that change all the time.
_CAPACITY_INTERVAL_S = 3.0
_FACTS_INTERVAL_S = 60.0
# Seconds between measurements of the link.
_SPEED_INTERVAL_S = 3600.0
# Seconds without an answer after which every job is reported again, because the head may have shown the box as away.
_REPORTS_AGAIN_S = 10.0
# Events of one job in one call.
_MAX_EVENTS = 500
_DEFAULT_LEASE_S = 600.0
# The home of a taken job in this box's database until the head has read that the box has it. No dispatcher has it.
_UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxFunctions:
    """The agent's looks at its box."""

    facts: Callable[[], BoxFacts]
    capacity: Callable[[], CapacityReport]


class Agent:
    """The agent of one box. One thread calls `tick`."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        link: HeadLink,
        functions: BoxFunctions,
        *,
        name: str,
        upkeep: LinkUpkeep | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: the box's, as the head has it. `upkeep`: of its links to other boxes; None: it has none."""
        self._database = database
        self._settings = settings
        self._link = link
        self._functions = functions
        self._name = name
        self._upkeep = upkeep
        self._clock = clock
        self._node = node_of(settings.home)
        self._takings = Takings(settings, link, lambda: self._name)
        self._sendings = Sendings(settings, link, lambda: self._name)
        self._parts = Parts(database, settings, self._takings, name)
        self._probes = Probes(settings)
        self._memory = _Memory(settings.home, clock)
        self._done = self._memory.read_done()
        self._cursors: Mapping[str, int] = {}
        self._told: dict[str, str] = {}  # digests of the reports that the head has stored, by job
        self._told_facts: tuple[float, BoxFacts] | None = None
        self._told_capacity_at = -_CAPACITY_INTERVAL_S
        self._speed: float | None = None  # of the link, in bytes per second
        self._speed_at: float | None = None
        self._lost: dict[str, str] = {}  # why jobs that the head counts on are not here

    # --- one call -----------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Calls the head once and does what it says. Returns whether there was news, so that the next call is soon.

        Raises:
            HeadUnreachable, HeadRefused: the head did not answer, or not as it should.
            BoxRemoved: the head has removed this box. It holds from now on.
        """
        try:
            return self._call()
        except BoxRemoved:  # a transfer may learn it first
            write_hold(self._settings.home, f"box {self._name} was removed from its service")
            raise

    def _call(self) -> bool:
        jobs = self._held()
        reports = self._reports(jobs)[:MOST_JOBS]  # the others follow with the next call
        request = self._request(jobs, reports)
        try:
            reply = self._link.sync(request)
        except (HeadUnreachable, HeadRefused):
            self._on_silence()
            raise
        self._on_answer(request, reply, reports)
        if self._upkeep is not None:
            self._upkeep.tend()
        num_done = len(self._done)
        parts = self._parts.all()
        self._match(jobs, parts, reply)
        self._parts.match(parts, reply.parts)
        self._carry_out(reply.instructions)
        self._probes.follow(reply.probe)
        is_measuring = reply.probe is not None
        return bool(reports) or len(self._done) != num_done or bool(self._takings.job_ids()) or is_measuring

    def close(self) -> None:
        """Ends the transfers, and what is measured. What has arrived stays."""
        self._probes.close()
        self._takings.close()
        self._sendings.close()
        self._parts.close()

    def _held(self) -> Sequence[Job]:
        """Returns the jobs of the head that this box has. A home may have jobs of its own from before it joined."""
        taken = self._takings.taken()
        with self._database.read() as session:
            return [job for job in MirrorRepository(session).held() if job.id in taken]

    def _request(self, jobs: Sequence[Job], reports: Sequence[JobReport]) -> SyncRequest:
        facts = capacity = None
        now = self._clock()
        if now - self._told_capacity_at >= _CAPACITY_INTERVAL_S:
            capacity, self._told_capacity_at = self._functions.capacity(), now
            facts = self._new_facts(now)
        copying = {**self._lost, **self._takings.texts()}
        copying |= {job.id: self._sendings.text(job.id) for job in jobs if job.status in TERMINAL_STATUSES}
        return SyncRequest(
            done=tuple(sorted(self._done)[:MOST_JOBS]),
            capacity=capacity,
            facts=facts,
            probe=self._probes.answer(),
            held=tuple(job.id for job in jobs),
            jobs=tuple(reports),
            copying=copying,
            parts=self._parts.reports(),
        )

    def _new_facts(self, now: float) -> BoxFacts | None:
        """Returns the facts if they have changed. Free space alone counts only once in a while."""
        facts = self._functions.facts().model_copy(update={"link_bytes_per_s": self._link_speed(now)})
        if self._told_facts is not None:
            told_at, told = self._told_facts
            if facts == told or (now - told_at < _FACTS_INTERVAL_S and _lasting(facts) == _lasting(told)):
                return None
        self._told_facts = (now, facts)
        return facts

    def _link_speed(self, now: float) -> float | None:
        """Returns the link's last measured speed. It is measured again now and then, while no files are copied."""
        is_idle = not self._takings.job_ids() and not self._sendings.is_sending()
        if is_idle and (self._speed_at is None or now - self._speed_at >= _SPEED_INTERVAL_S):
            self._speed_at = now
            with suppress(HeadUnreachable, HeadRefused):  # an older head has no such call
                self._speed = self._link.measure_speed()
        return self._speed

    def _on_silence(self) -> None:
        self._told_facts, self._told_capacity_at = None, -_CAPACITY_INTERVAL_S + self._clock()
        silence = self._memory.silence()
        if silence.is_too_long:
            write_hold(self._settings.home, silence.reason(f"box {self._name}"))

    def _on_answer(self, request: SyncRequest, reply: SyncReply, reports: Sequence[JobReport]) -> None:
        silent_s = self._memory.silence().seconds
        self._memory.answered(reply.lease_s)
        drained = reply.state is BoxState.DRAINING
        write_hold(self._settings.home, f"box {self._name} is being drained" if drained else None)
        if silent_s > _REPORTS_AGAIN_S:
            self._told.clear()
        self._cursors = reply.cursors
        # Fields of a job with an instruction that was not carried out were left out by the head.
        open_jobs = {each.job_id for each in reply.instructions}
        for report in reports:
            if report.id not in open_jobs and report.id not in reply.missing:
                self._told[report.id] = _digest(report)
        for job_id, names in reply.missing.items():
            self._sendings.send_again(job_id, names)
        listed = {each.ordinal for each in reply.instructions}
        if not self._done <= listed:
            self._done &= listed
            self._memory.keep_done(self._done)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _reports(self, jobs: Sequence[Job]) -> list[JobReport]:
        """Collects what is new of the jobs that the head counts on."""
        reports = []
        for job in jobs:
            cursor = self._cursors.get(job.id)
            if cursor is None or job.node != self._node:
                continue
            with self._database.read() as session:
                mirror = MirrorRepository(session)
                report = mirror.report(job, after=max(cursor, 0), limit=_MAX_EVENTS)
                row = mirror.row_of(job) if cursor < 0 else None
            self._sendings.go_on(report)
            may_tell_all = job.status not in TERMINAL_STATUSES or self._sendings.is_complete(report)
            report = replace(report, checkpoints=self._sendings.sent_checkpoints(report), row=row)
            if not may_tell_all:
                report = _without_end(report)
            if report.events or row is not None or _digest(report) != self._told.get(job.id):
                reports.append(report)
        return reports

    # --- jobs that the head gives, and takes back ---------------------------------------------------------------------

    def _match(self, jobs: Sequence[Job], parts: Sequence[JobPart], reply: SyncReply) -> None:
        """Begins jobs that the head knows to be here, and removes those that it does not count on."""
        takes = {each.job_id for each in reply.instructions if each.kind is Instruction.TAKE}
        for job in jobs:
            if job.id in reply.cursors:
                if job.node == _UNCONFIRMED:
                    with self._database.write() as session:
                        MirrorRepository(session).begin(job.id, self._node)
            elif job.id not in takes:
                self._discard(job.id, job)
        held = {job.id for job in jobs} | {part.job_id for part in parts}
        wanted = takes | reply.cursors.keys() | reply.parts.keys()
        for job_id in {*self._takings.taken(), *self._takings.job_ids()} - held - wanted:
            self._discard(job_id, None)  # taken back while it was fetched, or removed just now
        self._lost = {job_id: why for job_id, why in self._lost.items() if job_id in reply.cursors}
        for job_id in reply.cursors.keys() - held - takes - self._lost.keys():
            self._take(job_id)  # this box's database was restored from an older backup, or lost

    def _take(self, job_id: str) -> bool:
        """Goes on with taking a job. Returns whether it is here."""
        if self._find(job_id) is not None:
            return self._takings.end(job_id)
        row = self._takings.take(job_id)
        if row is None:
            return False
        self._takings.end(job_id)
        if row["attempt"] != 0:
            self._lost[job_id] = f"box {self._name} has lost its states; start it again on another box"
            return True
        with self._database.write() as session:
            MirrorRepository(session).insert(row, _UNCONFIRMED)
        _LOG.info("taken", extra=about(job_id))
        return True

    def _discard(self, job_id: str, job: Job | None) -> bool:
        """Removes a job from this box, its rows last. Returns False if it goes on with the next call.

        A job that has not ended is cancelled first. Raises nothing: what cannot be removed is tried again.
        """
        if not self._takings.end(job_id) or not self._sendings.end(job_id):
            return False
        if job is not None and job.status not in TERMINAL_STATUSES:
            with self._database.write() as session:
                MirrorRepository(session).carry_out(Instruction.CANCEL, job_id, {})
            return False
        try:
            if job is not None and not self._remove_files(job):
                return False
            with self._database.write() as session:
                for file_id in job.result_files if job is not None else ():
                    with suppress(NotFound):
                        FileRepository(session).delete(file_id)
                MirrorRepository(session).forget(job_id)
            deletion.remove_job_folder(self._settings, job_id)
        except OSError as error:
            _LOG.warning("it could not be removed yet: %s", error, extra=about(job_id))
            return False
        self._sendings.forget(job_id)
        self._takings.forget(job_id)
        self._told.pop(job_id, None)
        _LOG.info("discarded", extra=about(job_id))
        return True

    def _remove_files(self, job: Job) -> bool:
        for file_id in job.result_files:
            (self._settings.files_dir / file_id).unlink(missing_ok=True)
        return deletion.remove_job_files(self._settings, job.id, attempt=job.attempt, model=model_name(job))

    def _find(self, job_id: str) -> Job | None:
        return next((job for job in self._held() if job.id == job_id), None)

    # --- instructions -------------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[InstructionMessage]) -> None:
        """Carries out instructions. Those about one job keep their order; a job that is being copied delays no other.

        An instruction that is repeated, because this process was killed in between, has no further effect.
        """
        waiting: set[str] = set()
        for each in instructions:
            if each.ordinal in self._done or each.job_id in waiting:
                continue
            if not self._try(each):
                waiting.add(each.job_id)
                continue
            self._done.add(each.ordinal)
            self._memory.keep_done(self._done)

    def _try(self, each: InstructionMessage) -> bool:
        if each.kind is Instruction.TAKE:
            return self._take(each.job_id)
        with self._database.write() as session:
            refusal = MirrorRepository(session).carry_out(each.kind, each.job_id, each.body)
        if refusal is not None:
            _LOG.info("not carried out: %s: %s", each.kind.value, refusal, extra=about(each.job_id))
        return True


class _Memory:
    """The few facts that the agent keeps in the home beside its database."""

    def __init__(self, home: Path, clock: Callable[[], float]) -> None:
        self._done_path = home / "instructions.json"
        self._home = home
        self._clock = clock
        self._fails_to_note = False
        before = read_silence(home) or Silence(0.0, _DEFAULT_LEASE_S)
        self._lease_s, self._answered_at = before.lease_s, clock() - before.seconds

    def silence(self) -> Silence:
        """Returns the time since the head's last answer. Before this process began it follows from the file."""
        return Silence(self._clock() - self._answered_at, self._lease_s)

    def answered(self, lease_s: float) -> None:
        """Notes an answer of the head."""
        self._answered_at, self._lease_s = self._clock(), lease_s
        try:
            note_answer(self._home, lease_s)
        except OSError as error:  # the lease only seems older
            if not self._fails_to_note:
                _LOG.warning("the head's answers cannot be noted, so this box will hold after its lease: %s", error)
            self._fails_to_note = True
        else:
            self._fails_to_note = False

    def read_done(self) -> set[int]:
        """Returns the instructions that were carried out and that the head still listed."""
        try:
            return {int(ordinal) for ordinal in json.loads(self._done_path.read_text())}
        except (OSError, ValueError, TypeError):
            return set()

    def keep_done(self, done: set[int]) -> None:
        """Stores the instructions that were carried out."""
        with suppress(OSError):  # on a full disk: they are carried out again after a restart, which changes nothing
            write_atomically(self._done_path, json.dumps(sorted(done)))


def run_until(ending: threading.Event, agent: Agent, *, pause_s: float = _INTERVAL_S) -> None:
    """Calls the head until `ending` is set. Raises BoxRemoved if the head has removed this box.

    `pause_s`: the first pause after a call that failed is twice as long.
    """
    was_silent = False
    try:
        while not ending.is_set():
            try:
                has_news = agent.tick()
            except BoxRemoved:
                raise
            except (HeadUnreachable, HeadRefused, SQLAlchemyError, OSError) as error:  # or a full disk
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                if not was_silent:
                    _LOG.warning("%s; the head is called again and again", error)
                was_silent = True
            else:
                if was_silent:
                    _LOG.info("the head answers again")
                pause_s, was_silent = (_SHORT_INTERVAL_S if has_news else _INTERVAL_S), False
            ending.wait(pause_s)
    finally:
        agent.close()


def _without_end(report: JobReport) -> JobReport:
    """Returns a report without the job's end, which is told once all results have arrived."""
    ends = {status.value for status in TERMINAL_STATUSES}
    num_before = next(
        (index for index, event in enumerate(report.events) if event.data.get("status") in ends), len(report.events)
    )
    return replace(report, fields={}, events=report.events[:num_before], files=())


def _digest(report: JobReport) -> str:
    """Returns a digest of what a report tells beside its events."""
    told = repr((report.fields, report.checkpoints))
    return hashlib.sha256(told.encode(errors="replace")).hexdigest()


def _lasting(facts: BoxFacts) -> BoxFacts:
    """Returns the facts without what changes all the time."""
    ssds = tuple(ssd.model_copy(update={"free_nbytes": 0, "written_nbytes": None}) for ssd in facts.ssds)
    return facts.model_copy(update={"ssds": ssds})


def functions_of(settings: Settings) -> BoxFunctions:
    """Returns the looks at this box."""
    facts, num_devices = FactsHere(settings), MachineResources.here(settings).num_devices

    def capacity() -> CapacityReport:
        free = read_capacity(settings)
        ssds = [
            SsdSpaceReport(disk=ssd.disk, free_nbytes=ssd.free_nbytes, rate=ssd.rate, held=dict(ssd.held))
            for ssd in free.ssds
        ]
        return CapacityReport(
            num_devices=num_devices,
            host_nbytes=free.host_nbytes,
            room_nbytes=free.room_nbytes,
            buffers=dict(free.buffers),
            ssds=tuple(ssds),
        )

    return BoxFunctions(facts=facts.read, capacity=capacity)


def run_agent(settings: Settings) -> None:
    """Works for the head that this home has joined, until SIGTERM, or until the head has removed this box.

    Raises ReportedError if the home has joined no head, or if its certificate cannot be used.
    """
    ending = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda _signum, _frame: ending.set())
    with HeadConnection.of_box(settings.home) as connection:
        membership = membership_of(settings.home)
        assert membership is not None, "the connection was opened by it"
        database = Database(settings.database_url)
        try:
            link = HeadLink(connection)
            upkeep = LinkUpkeep(settings.home, link, link_name(membership.name, membership.box_id))
            functions = functions_of(settings)
            run_until(ending, Agent(database, settings, link, functions, name=membership.name, upkeep=upkeep))
        except BoxRemoved as error:
            _LOG.warning("%s; this box begins no more attempts", error)
        finally:
            database.close()
