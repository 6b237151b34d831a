"""Jobs over several boxes on the head: their plans, the parts that other boxes get, and their attempts.

The head's own box is always the first. It has the scheduler, the journal and the exports. The other boxes serve it. A
job on one box is here only until its states have moved to or from others.
"""

import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from windlass.planner.stages import PairRate, StagesPlan
from windlass.service.dispatcher import AskStages, Boxes, Runners, fail_job, had_attempt
from windlass.service.dispatcher.parts.links import link_config, move_of, new_links, with_move
from windlass.service.dispatcher.placement import JoinedBox, MachineCapacity, Wait
from windlass.service.installation import Settings, about, link_host_of, node_of
from windlass.service.jobs import (
    BoxKind,
    MachineResources,
    build_stage_spec,
    chooses_gpus,
    division_of,
    fields_of_stages,
    fields_on_one_box,
    forget_next_stages,
    forget_stages,
    is_for_several,
    is_moved,
    job_dir,
    keep_next_stages,
    keep_plan_request,
    keep_simulated,
    keep_stages,
    next_stages_of,
    stages_of,
    stages_of_answer,
    stages_request,
)
from windlass.service.machine import measured_hardware
from windlass.service.machine.fleet import (
    PartLink,
    link_name,
    link_name_of_head,
    reserve_link_port,
)
from windlass.service.preparation import PLAN_STAGES, Preparation, PreparationError
from windlass.service.validation import ReportedError, count_text
from windlass.storage.ids import HEAD_NAME, BoxName
from windlass.storage.sql import Database, Job, JobPart, JobStatus, StatusConflict
from windlass.storage.sql.repositories import (
    HEAD_ID,
    BoxRepository,
    EventRepository,
    JobRepository,
    PartRepository,
    PartState,
)

_LOG = logging.getLogger(__name__)

UNKNOWN_PARTS = (
    "its boxes are not known, because the service was restored from a backup that is older than its division, and not "
    "all of them have told of their parts yet; `windlass restart` begins it again from its newest exported model"
)
_NO_ADDRESS = (
    "the service is not open to its other boxes; end it with `windlass down`, and start it with `windlass up "
    "--cluster-host IP`, where IP is the head's address that they reach"
)
_ADOPTED = (
    "Goes on with the division that its boxes have: the service was restored from a backup that is older than that"
)


@dataclass(slots=True)
class _Planning:
    job_id: str
    asked: Mapping[str, Any]  # the job's settings, which also say over how many boxes
    boxes: Sequence[JoinedBox]  # of which the plan chooses
    work_dir: Path
    preparation: Preparation
    plan: StagesPlan | None = None  # once it is made; it may be for other boxes than the job waits for

    def is_for(self, job: Job, pool: Sequence[JoinedBox]) -> bool:
        """Returns whether the plan is by a job's settings, and all boxes of which it chooses are among these."""
        return self.asked == job.windlass and {box.node for box in self.boxes} <= {box.node for box in pool}


@dataclass(slots=True)
class SpreadJobs:
    """The jobs over several boxes of one dispatcher of a head. Its memory may be lost at any time."""

    database: Database
    settings: Settings
    runners: Runners
    resources: MachineResources
    ask: AskStages
    look: Callable[[], MachineCapacity]  # at this box
    boxes: Boxes
    _planning: _Planning | None = None
    _ports: dict[str, socket.socket] = field(default_factory=dict)  # kept for the attempts of jobs

    def drop(self, *, keep: Collection[str]) -> None:
        """Ends the planning of any other job: it was cancelled, or it is not its turn any more."""
        if self._planning is not None and self._planning.job_id not in keep:
            self._planning.preparation.stop()
            self._planning = None

    def drop_plan_of(self, job_id: str) -> None:
        """Ends the planning of a job that does not go on with it."""
        if self._planning is not None and self._planning.job_id == job_id:
            self.drop(keep=())

    def close(self) -> None:
        """Ends the planner process."""
        self.drop(keep=())
        for kept in self._ports.values():
            kept.close()
        self._ports.clear()

    def give(self, job: Job, boxes: Sequence[JoinedBox], pools: Sequence[Sequence[JoinedBox]]) -> str | None:
        """Plans a job over as many boxes as these and the head's own, and gives each its part.

        The plan chooses the boxes from the first of `pools`; if none of them fit, from the next. If they are not
        `boxes`, the job gets its parts once it may begin on them. Returns why the job waits, None if it has failed or
        was paused.
        """
        if had_attempt(job, self.boxes.parts_of(job.id)):
            return "it has states, and was resumed just now"  # the next pass goes on with its division
        planning = self._planning
        if planning is not None and planning.job_id != job.id:
            return "its plan over several boxes is made after that of another job"
        if planning is not None and not planning.is_for(job, pools[-1]):
            self.drop(keep=())
            planning = None
        try:
            if planning is None:
                planning = self._planning = self._begin(job, len(boxes), pools[0])
            elif planning.plan is None:
                planning.plan = self._poll(planning)
        except PreparationError as error:
            self.drop(keep=())
            assert planning is not None, "it was polled"
            if error.code == "does_not_fit" and len(planning.boxes) < len(pools[-1]):
                planning = self._planning = self._begin(job, len(boxes), pools[-1])
            else:
                return self._fail(job, pools[-1], error.code, error.message, error.param)
        except (OSError, ValueError) as error:
            return self._fail(job, pools[-1], "invalid_value", f"it cannot be planned over its boxes: {error}")
        if planning.plan is not None:
            others = planning.plan.boxes[1:]
            if set(others) == {box.name for box in boxes}:
                self.drop(keep=())
                self._keep(job, planning, boxes, planning.plan)
            else:
                self.boxes.choose(job.id, others)
        names = [HEAD_NAME, *(box.name for box in planning.boxes)]
        some = f"{len(boxes) + 1} of " if len(names) > len(boxes) + 1 else ""
        return f"its plan over {some}{'the boxes' if len(names) > 1 else 'box'} {', '.join(names)} is being made"

    def _begin(
        self, job: Job, number: int, boxes: Sequence[JoinedBox], *, before: StagesPlan | None = None
    ) -> _Planning:
        """Asks for a plan over the head's own box and so many of others. Raises OSError or ValueError.

        `before`: the job's division so far.
        """
        here = BoxKind.of_home(self.settings, self.resources, measured_hardware(self.settings))
        named: list[tuple[str, BoxKind, int | None]] = [(HEAD_NAME, here, self.look().states_nbytes())]
        named += [(box.name, box.kind, box.capacity.states_nbytes()) for box in boxes]
        request = stages_request(self.settings, job, named, 1 + number, self._rates(boxes), before)
        if not number and here.hardware is not None:  # so that its plan on one box is corrected and renewed, as others
            keep_plan_request(self.settings, job, request.on(request.boxes[0], here.hardware))
        work_dir = job_dir(self.settings, job.id) / "prepare" / "stages.partial"
        return _Planning(job.id, job.windlass, boxes, work_dir, self.ask(work_dir, request))

    def _fail(
        self, job: Job, boxes: Sequence[JoinedBox], code: str, message: str, param: str | None = None
    ) -> str | None:
        """Ends a job that cannot be planned over these boxes, or keeps its parts. Then it returns why the job waits.

        A job that was divided, and then resumed with these boxes, is paused, and has its boxes from then on.
        """
        if self.boxes.rule_out(job, boxes, message) or had_attempt(job, self.boxes.parts_of(job.id)):
            return f"it cannot be planned over other boxes than its own: {message}"
        parts, before = self.boxes.parts_of(job.id), stages_of(self.settings, job.id)
        are_there = {part.node for part in parts} <= {box.node for box in self.boxes.by_name.values()}
        if parts and before is not None and are_there and self.boxes.are_of(parts, before):
            self._refuse(job, before, message)
            return None
        with self.database.write() as session:
            fail_job(session, job, code, message, param)
        return None

    def _rates(self, boxes: Sequence[JoinedBox]) -> list[PairRate]:
        """Returns the measured rates between the boxes of which a plan chooses."""
        names = {HEAD_ID: HEAD_NAME} | {box.id: box.name for box in boxes}
        with self.database.read() as session:
            rates = BoxRepository(session).rates(node_of(self.settings.home))
        return [
            PairRate(source=names[rate.source], target=names[rate.target], bytes_per_s=rate.bytes_per_s)
            for rate in rates
            if {rate.source, rate.target} <= names.keys()
        ]

    def _poll(self, planning: _Planning) -> StagesPlan | None:
        """Returns the plan, None if it is not made yet. Raises PreparationError if none can be made."""
        results = planning.preparation.poll()
        return None if results is None else stages_of_answer(results[PLAN_STAGES])

    def _keep(self, job: Job, planning: "_Planning", boxes: Sequence[JoinedBox], plan: StagesPlan) -> None:
        """Makes a plan the job's first division, in place of one with which it never began."""
        by_name, fields = {box.name: box for box in boxes}, fields_of_stages(job, plan)
        # Before the rows say so, because the boxes fetch it. Without the rows, its earlier parts are not in force.
        if plan.is_over_several:
            keep_stages(self.settings, job.id, plan)
        else:
            forget_stages(self.settings, job.id)  # it may have been divided before its boxes left; it has no states
            fields |= fields_on_one_box(self.settings, job, plan)
        with self.database.write() as session:
            _check_asks_the_same(session, job)
            parts, given = PartRepository(session), {by_name[stage.box].node for stage in plan.stages[1:]}
            for part in parts.of_job(job.id):
                if part.node not in given:
                    parts.place(job.id, part.node, None)
            for position, stage in enumerate(plan.stages[1:], start=1):
                parts.give(job.id, by_name[stage.box].node, position=position)
            JobRepository(session).set_fields(job.id, seen=job, **fields)
            for note in plan.notes:
                EventRepository(session).add(job.id, attempt=0, message=note, level="warn")
            divided = f"Divided over {len(plan.stages)} boxes" if plan.is_over_several else "Planned on one box"
            EventRepository(session).add(job.id, attempt=0, message=f"{divided}: {_told(plan)}")
        keep_simulated(self.settings, job.id, planning.work_dir)
        _LOG.info("divided over %d boxes", len(plan.stages), extra=about(job.id))

    # --- another division ---------------------------------------------------------------------------------------------

    def wait_for_division(self, job: Job) -> Wait | None:
        """Goes on with the division of a waiting job over boxes. Returns why the job waits for it, or None."""
        parts = self.boxes.parts_in_force(job)
        if had_attempt(job, parts):
            wait = self.redivide(job, parts, *self.boxes.wanted_of(job, parts))
            return wait or self.why_no_attempt(job, parts)
        return self.why_no_attempt(job, parts) if parts else None

    def redivide(
        self, job: Job, parts: Sequence[JobPart], wanted: int | Sequence[str], pool: Sequence[JoinedBox] | str
    ) -> Wait | None:
        """Goes on with a new division of a job that asks for other boxes than it has, until all have a part.

        `wanted`: the number of boxes, or their names. `pool`: the other boxes of which the plan may choose, or why
        there are none. Returns why the job waits, also if it was paused; None if the next attempt may begin. That moves
        the states if `next_stages_of` has a division.
        """
        try:
            before, after = self._division(job, parts), next_stages_of(self.settings, job.id)
        except (OSError, ValueError) as error:
            return Wait(reason=f"it cannot be read which blocks it has: {error}")
        if before is None or len(parts) < len(before.stages) - 1:
            return None  # see `why_no_attempt`
        if after is not None and (_is_over(after, wanted) or is_moved(self.settings, job.id, after)):
            return self._give_next(job, parts, after)
        if after is not None:
            self._give_up(job, before)
            return Wait(reason="its new division is given up; the states are where they were", is_soon=True)
        if _is_over(before, wanted):
            self.drop_plan_of(job.id)
            if not before.is_over_several:
                self._stay_on_one_box(job)
            return None
        found = self._pool(job, before, wanted, pool)
        if isinstance(found, str):
            self.drop_plan_of(job.id)  # other jobs do not wait for it
            return Wait(reason=found)
        return self._plan_next(job, before, wanted if isinstance(wanted, int) else len(wanted), found)

    @staticmethod
    def _pool(
        job: Job, before: StagesPlan, wanted: int | Sequence[str], pool: Sequence[JoinedBox] | str
    ) -> Sequence[JoinedBox] | str:
        """Returns the boxes of which a new plan may choose, or why there are too few."""
        if isinstance(pool, str) or not isinstance(wanted, int):
            return pool
        if wanted == 1:
            return ()
        if not chooses_gpus(job):
            pool = [box for box in pool if box.resources.why_too_many(before.num_ranks) is None]
        if len(pool) >= wanted - 1:
            return pool
        gpus = count_text(before.num_ranks, "GPU")
        return f"it asks for {wanted} boxes with {gpus} each, and {len(pool) + 1} are open to it"

    def _plan_next(self, job: Job, before: StagesPlan, number: int, pool: Sequence[JoinedBox]) -> Wait:
        """Goes on with the plan of a new division over so many boxes. Pauses the job if there is none."""
        if self._planning is not None and not self._planning.is_for(job, pool):
            self.drop_plan_of(job.id)  # a box has left, or its owner has asked for others
        planning = self._planning
        if planning is not None and planning.job_id != job.id:
            return Wait(reason="its new plan over several boxes is made after that of another job", is_soon=True)
        try:
            if planning is None:
                planning = self._planning = self._begin(job, number - 1, pool, before=before)
            elif (plan := self._poll(planning)) is not None:
                self.drop(keep=())
                self._keep_next(job, planning, before, plan)
        except (PreparationError, OSError, ValueError) as error:
            self.drop(keep=())
            why = error.message if isinstance(error, PreparationError) else str(error)
            self._refuse(job, before, why)
            return Wait(reason="")
        names = ", ".join([HEAD_NAME, *(box.name for box in planning.boxes)])
        some = f"{number} of the boxes" if number > 1 else "box"
        return Wait(reason=f"its new plan over {some} {names} is being made", is_soon=True)

    def _division(self, job: Job, parts: Sequence[JobPart]) -> StagesPlan | None:
        """Returns the division in which a job's blocks are, None if it is not known."""
        if parts and stages_of(self.settings, job.id) is None:
            return None  # this home was restored from a backup, and the boxes tell the division
        return division_of(self.settings, job)

    def _stay_on_one_box(self, job: Job) -> None:
        """Makes a job that is on one box, and is to be, an ordinary one."""
        with self.database.write() as session:
            _check_asks_the_same(session, job)
            JobRepository(session).set_fields(job.id, seen=job, windlass={**job.windlass, "boxes": None})

    def _keep_next(self, job: Job, planning: _Planning, before: StagesPlan, plan: StagesPlan) -> None:
        """Stores a new division. The old one stays in force. Raises ValueError if the bits would not be the same."""
        fields_of_stages(job, plan)
        if (plan.num_ranks, plan.update_order) != (before.num_ranks, before.update_order):
            new, old = (
                f"{count_text(each.num_ranks, 'GPU')} a box and {each.update_order.value} updates"
                for each in (plan, before)
            )
            raise ValueError(f"the new plan has {new}, and the job began with {old}: name boxes with as many GPUs")
        with self.database.write() as session:
            JobRepository(session).check_held(job)
            for note in plan.notes:
                EventRepository(session).add(job.id, attempt=job.attempt, message=note, level="warn")
            what = f"divided anew over {len(plan.stages)} boxes" if plan.is_over_several else "moved to one box"
            message = f"To be {what}: {_told(plan)}"
            EventRepository(session).add(job.id, attempt=job.attempt, message=message)
        if not before.is_over_several:  # it may have none stored, or one of another time; boxes fetch it with the files
            keep_stages(self.settings, job.id, before)
        keep_simulated(self.settings, job.id, planning.work_dir, is_next=True)
        keep_next_stages(self.settings, job.id, replace(plan, layout_epoch=before.layout_epoch + 1))
        _LOG.info("to be divided anew over %d boxes", len(plan.stages), extra=about(job.id))

    def _give_next(self, job: Job, parts: Sequence[JobPart], after: StagesPlan) -> Wait | None:
        """Gives a part to each box of a new division that has none. Returns why the job waits, None if all have one."""
        with self.database.read() as session:
            by_name = {box.name: box for box in BoxRepository(session).all(node_of(self.settings.home))}
        held, last = {part.node for part in parts}, max((part.position for part in parts), default=0)
        for name in after.boxes[1:]:
            if (box := by_name.get(name)) is None:
                return Wait(reason=f"box {name}, which is to get a part of it, has left; resume it with other --boxes")
            if box.node in held:
                continue
            with self.database.write() as session:
                if PartRepository(session).find(job.id, box.node) is not None:
                    return Wait(reason=f"box {name} is still removing the part of it that it had")
                PartRepository(session).add(job.id, box.node, position=last + 1, state=PartState.COPYING)
            return Wait(reason=f"its files are to be copied to box {name}")
        return None

    def _give_up(self, job: Job, before: StagesPlan) -> None:
        """Gives up a division to which the states have not been moved. Boxes that would have got some leave."""
        with self.database.write() as session:
            parts, boxes = PartRepository(session), BoxRepository(session)
            for part in parts.of_job(job.id):
                if (box := boxes.by_node(part.node)) is not None and box.name not in before.boxes:
                    parts.place(job.id, part.node, None)
            message = "The new division is given up; the states are where they were"
            EventRepository(session).add(job.id, attempt=job.attempt, message=message)
        forget_next_stages(self.settings, job.id)

    def _refuse(self, job: Job, before: StagesPlan, why: str) -> None:
        """Pauses a job that cannot be divided over the boxes that it asks for. It has its boxes from then on."""
        names, those = list(before.boxes), "these boxes" if is_for_several(job) else "one box"
        message = f"Paused, because it cannot be moved to {those}: {why}. It stays on {', '.join(names)}; resume it"
        with self.database.write() as session:
            _check_asks_the_same(session, job)
            JobRepository(session).transition(
                job.id,
                JobStatus.QUEUED,
                JobStatus.PAUSED,
                message=message,
                level="error",
                seen=job,
                windlass={**job.windlass, "boxes": names if before.is_over_several else None},
            )

    # --- attempts -----------------------------------------------------------------------------------------------------

    def why_no_attempt(self, job: Job, parts: Sequence[JobPart]) -> Wait | None:
        """Returns why no attempt of a divided job can begin until a person has mended something, or None.

        The job's row gets the numbers of its division if it has others.
        """
        with self.database.read() as session:
            now = PartRepository(session).of_job(job.id)
        if _places(now) != _places(parts):  # an attempt of this pass has moved its states
            return Wait(reason="its boxes have changed", is_soon=True)
        plan, after = stages_of(self.settings, job.id), next_stages_of(self.settings, job.id)
        if plan is None or not self.boxes.are_of(parts, plan, after):
            return Wait(reason=UNKNOWN_PARTS)
        if link_host_of(self.settings) is None:
            return Wait(reason=_NO_ADDRESS)
        try:
            fields = fields_of_stages(job, plan)
        except ValueError as error:
            return Wait(reason=str(error))
        if fields["hyperparameters"] != job.hyperparameters:
            with self.database.write() as session:
                JobRepository(session).set_fields(job.id, seen=job, **fields)
                if max((part.served for part in parts), default=0) > job.attempt:
                    # The boxes have the division since attempts that the database does not know.
                    EventRepository(session).add(job.id, attempt=job.attempt, message=_ADOPTED, level="warn")
            return Wait(reason="its row gets the numbers of its division", is_soon=True)
        return None

    def new_attempt(self, job: Job, boxes: Sequence[JoinedBox], parts: Sequence[JobPart]) -> Sequence[PartLink]:
        """Returns how the boxes reach each other in a job's next attempt, the head first.

        Raises ReportedError if the head has no address or port for it.
        """
        host = link_host_of(self.settings)
        if host is None:
            raise ReportedError(_NO_ADDRESS)
        self._free_port(job.id)
        kept = self._ports[job.id] = reserve_link_port(host, self.settings.link_port_range)
        addresses: dict[BoxName, tuple[str, int]] = {link_name_of_head(): (host, kept.getsockname()[1])}
        by_node = {box.node: box for box in boxes}
        for part in parts:
            box = by_node[part.node]
            host = None if box.facts is None else box.facts.link_host
            if host is None or part.port is None:
                raise ReportedError(f"box {box.name} has not told its address for other boxes")
            addresses[link_name(box.name, box.id)] = (host, part.port)
        links, before = new_links(addresses), stages_of(self.settings, job.id)
        after = next_stages_of(self.settings, job.id)
        if before is None or after is None:
            return links
        return with_move(links, before, after, [HEAD_NAME, *(by_node[part.node].name for part in parts)])

    def reserve(self, job: Job, parts: Sequence[JobPart], *, is_wanted: bool) -> None:
        """Lets the other boxes begin no jobs of their own, and end attempts at a commit, for a job that will begin."""
        last = max([job.attempt, *(part.served for part in parts)])
        for part in parts:
            has = part.link is None and part.attempt > last
            if has != is_wanted or part.link is not None:  # with a link, nothing was decided since the last attempt
                attempt = last + 1 if is_wanted else 0
                with self.database.write() as session:
                    # Its owner, or another dispatcher, may have decided otherwise since it was read.
                    JobRepository(session).check_held(job)
                    if JobRepository(session).get(job.id).status is not job.status:
                        raise StatusConflict(job.id, job.status, "changed meanwhile")
                    PartRepository(session).want(job.id, part.node, attempt=attempt, link=None, is_over=False)

    def free(self, job: Job) -> None:
        """Frees the boxes of a job that its owner has paused, perhaps while they were reserved for it."""
        self.reserve(job, self.boxes.parts_of(job.id), is_wanted=False)

    @staticmethod
    def want(session: Session, job: Job, attempt: int, parts: Sequence[JobPart], links: Sequence[PartLink]) -> None:
        """Tells the other boxes of an attempt, in the transaction that begins it."""
        for part, link in zip(parts, links[1:], strict=True):
            told = link.model_dump(mode="json")
            PartRepository(session).want(job.id, part.node, attempt=attempt, link=told, is_over=False)

    def start(self, job: Job, links: Sequence[PartLink]) -> None:
        """Launches the first box's part of the attempt in the job's row. Raises as `Runners.start`."""
        if (told := links[0].move) is not None:
            move = move_of(self.settings, self.resources, job, told)
            self.runners.start_move(move, link_config(self.settings, links[0], 0))
            return
        plan = stages_of(self.settings, job.id)
        if plan is None:
            raise ValueError("the job's plan over its boxes cannot be read")
        specs = [build_stage_spec(self.settings, self.resources, job, plan, index) for index in range(len(plan.stages))]
        self.runners.start_first_part(specs, link_config(self.settings, links[0], 0))

    def ended(self, job_id: str) -> None:
        """Frees the port of a job's attempt. Forgets the parts of an ended job on boxes that were removed."""
        self._free_port(job_id)
        with self.database.write() as session:
            PartRepository(session).forget_removed(job_id)

    def _free_port(self, job_id: str) -> None:
        if (kept := self._ports.pop(job_id, None)) is not None:
            kept.close()


def _places(parts: Sequence[JobPart]) -> Sequence[tuple[str, int]]:
    return [(part.node, part.position) for part in parts]


def _is_over(plan: StagesPlan, wanted: int | Sequence[str]) -> bool:
    """Returns whether a division is over the boxes that a job asks for."""
    return len(plan.boxes) == wanted if isinstance(wanted, int) else set(plan.boxes) == set(wanted)


def _check_asks_the_same(session: Session, job: Job) -> None:
    """Raises StatusConflict if a job was resumed with other settings since it was read."""
    if JobRepository(session).get(job.id).windlass != job.windlass:
        raise StatusConflict(job.id, "as it was read", "resumed with other settings")


def _told(plan: StagesPlan) -> str:
    return "; ".join(f"box {stage.box}: blocks {stage.first_block} to {stage.stop_block - 1}" for stage in plan.stages)
