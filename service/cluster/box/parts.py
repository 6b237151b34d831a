"""The parts of jobs over several boxes that the head wants on this box: their files, their ports, and their removal.

The dispatcher serves their attempts. Both share the part's row: this module writes what is wanted.
"""

import logging
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.planner.stages import StagesPlan
from windlass.service.cluster.box.transfers import Takings, forget_taken, taken_content
from windlass.service.data import deletion
from windlass.service.installation import Settings, about, link_host_of, node_of
from windlass.service.jobs import keep_told_stages, stages_digest, stages_of, told_stages
from windlass.service.machine.fleet import LinkPortError, PartOrder, PartReport, model_name, reserve_link_port
from windlass.storage.sql import Database, JobPart
from windlass.storage.sql.repositories import PartRepository, PartState, job_of_row

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """The parts of this box, as its agent tends them. `name`: the box's, as the head has it."""

    database: Database
    settings: Settings
    takings: Takings
    name: str
    # Sockets that keep ports for the next attempts of parts, by the job and the attempt before.
    _ports: dict[tuple[str, int], socket.socket] = field(default_factory=dict)
    # The jobs of which the head has another plan over the boxes, or none, as its last answer says.
    _unlike: Collection[str] = ()
    # Why the new divisions of jobs could not be stored, by job.
    _not_stored: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Frees the ports."""
        for kept in self._ports.values():
            kept.close()

    def all(self) -> Sequence[JobPart]:
        """Lists the parts that this box has."""
        with self.database.read() as session:
            return PartRepository(session).on(self._node)

    def reports(self) -> dict[str, PartReport]:
        """Returns what the box tells of its parts, also of those whose files are being copied."""
        texts, reports = self.takings.texts(), dict[str, PartReport]()
        for part in self.all():
            told, port = texts.get(part.job_id, part.told), None
            if part.state == PartState.READY.value:
                try:
                    port = self._port_of(part)
                except LinkPortError as error:
                    told = str(error)
            told = self._not_stored.get(part.job_id, told)
            reports[part.job_id] = PartReport(
                position=part.position,
                state=PartState(part.state),
                served=part.served,
                port=port,
                told=told,
                plan=stages_digest(self.settings, part.job_id),
                division=self._division_of(part),
            )
        for key in self._ports.keys() - {(job_id, told.served) for job_id, told in reports.items()}:
            self._ports.pop(key).close()
        return reports

    def match(self, parts: Sequence[JobPart], orders: Mapping[str, PartOrder]) -> None:
        """Takes the parts that the head wants here, passes on what it wants of them, and removes all others."""
        known = {part.job_id: part for part in parts}
        self._unlike = {
            job_id
            for job_id, order in orders.items()
            if job_id in known and order.plan != stages_digest(self.settings, job_id)
        }
        self._not_stored = {job_id: why for job_id, why in self._not_stored.items() if job_id in self._unlike}
        for part in known.values():
            if part.job_id not in orders:
                self._remove(part)
            elif part.state == PartState.COPYING.value:
                self._take(part, orders[part.job_id])
            elif self._may_copy_again(part) and self._is_unlike(orders[part.job_id], part.job_id):
                self._copy_again(part)
            elif orders[part.job_id].division is not None:
                self._keep_division(part, orders[part.job_id])
        for job_id, order in orders.items():
            link = None if order.link is None else order.link.model_dump(mode="json")
            if self._is_unlike(order, job_id) and order.link is not None and order.link.move is None:
                # The attempt is of a division that this box has not got yet: the head sends it with its next answer.
                link = None
            before = known.get(job_id)
            told = None if before is None else (before.attempt, before.link, before.is_over, before.position)
            is_behind = before is not None and before.state == PartState.READY.value and before.served < order.ended
            if told == (order.attempt, link, order.ends_at_once, order.position) and not is_behind:
                continue
            with self.database.write() as session:
                rows = PartRepository(session)
                rows.add(job_id, self._node, position=order.position, state=PartState.COPYING)
                rows.place(job_id, self._node, order.position)
                rows.want(job_id, self._node, attempt=order.attempt, link=link, is_over=order.ends_at_once)
                rows.give_up(job_id, self._node, order.ended)

    @property
    def _node(self) -> str:
        return node_of(self.settings.home)

    def _port_of(self, part: JobPart) -> int | None:
        """Returns the port that is kept for the next attempt of a part. Raises LinkPortError."""
        host, key = link_host_of(self.settings), (part.job_id, part.served)
        if host is None:
            return None
        if key not in self._ports:
            self._ports[key] = reserve_link_port(host, self.settings.link_port_range)
        port: int = self._ports[key].getsockname()[1]
        return port

    def _division_of(self, part: JobPart) -> dict[str, Any] | None:
        """Returns the plan of a part with states, if the head has another one."""
        return told_stages(self.settings, part.job_id) if part.served and part.job_id in self._unlike else None

    def _is_unlike(self, order: PartOrder, job_id: str) -> bool:
        """Returns whether the head has another plan of a job than this box. A head that was restored may have none."""
        return order.plan is not None and job_id in self._unlike

    @staticmethod
    def _may_copy_again(part: JobPart) -> bool:
        """Returns whether a part has no states yet, so that the job may have been planned anew."""
        return not part.served and part.state == PartState.READY.value

    def _keep_division(self, part: JobPart, order: PartOrder) -> None:
        """Stores the division to which the job's states have been moved."""
        before, told = stages_of(self.settings, part.job_id), order.division or {}
        try:
            after = StagesPlan.from_json(told)
            if before is None or before.layout_epoch < after.layout_epoch:
                keep_told_stages(self.settings, part.job_id, told)
            self._not_stored.pop(part.job_id, None)
        except (OSError, ValueError) as error:
            self._not_stored[part.job_id] = f"box {self.name} cannot store its new division: {error}"
            _LOG.warning("its new division cannot be stored: %s", error, extra=about(part.job_id))

    def _copy_again(self, part: JobPart) -> None:
        """Copies the files of a part again. Those that have not changed are there."""
        with self.database.write() as session:
            PartRepository(session).copy_again(part.job_id, self._node)
        _LOG.info("planned anew; its files are copied again", extra=about(part.job_id))

    def _take(self, part: JobPart, order: PartOrder) -> None:
        row = self.takings.take(part.job_id, has_begun=order.gets_blocks)
        if row is None or not self.takings.end(part.job_id):
            return
        state, told = PartState.READY, None
        if row["attempt"] != 0 and not order.gets_blocks:
            state, told = PartState.LOST, f"box {self.name} has lost its part of the states"
        elif order.plan is not None and stages_digest(self.settings, part.job_id) != order.plan:
            return  # planned anew while its files were copied
        with self.database.write() as session:
            PartRepository(session).tell(part.job_id, self._node, state=state, served=0, told=told)
        _LOG.info("part %d is %s", part.position, state.value, extra=about(part.job_id))

    def _remove(self, part: JobPart) -> None:
        """Removes a part once the dispatcher has ended its processes. It goes on with the next call."""
        if not self.takings.end(part.job_id):
            return
        # First, so that the dispatcher begins no attempt any more.
        with self.database.write() as session:
            parts = PartRepository(session)
            parts.want(part.job_id, self._node, attempt=0, link=None, is_over=True)
            parts.copy_again(part.job_id, self._node)  # some of its files may be gone if the head wants it again
            now = parts.find(part.job_id, self._node)
        if now is not None and now.state != PartState.RUNNING.value:
            _remove_all_of(self.database, self.settings, now)


def discard_parts(database: Database, settings: Settings) -> Sequence[str]:
    """Removes all parts of this home, which leaves its head, with their rows, files and states. Its processes are gone.

    Returns the jobs of which something is left: their files could not be removed.
    """
    with database.read() as session:
        parts = PartRepository(session).on(node_of(settings.home))
    return [part.job_id for part in parts if not _remove_all_of(database, settings, part)]


def _remove_all_of(database: Database, settings: Settings, part: JobPart) -> bool:
    """Removes the files and states of a part without processes, and its row last. Returns False if some are left."""
    content = taken_content(settings, part.job_id)
    try:
        if content is not None:
            model = model_name(job_of_row(content.row, attempt=part.served))
            if not deletion.remove_job_files(settings, part.job_id, attempt=part.served, model=model):
                return False
        deletion.remove_job_folder(settings, part.job_id)
    except OSError as error:
        _LOG.warning("its part could not be removed yet: %s", error, extra=about(part.job_id))
        return False
    forget_taken(settings, part.job_id)
    with database.write() as session:
        PartRepository(session).remove(part.job_id, part.node)
    _LOG.info("its part was removed", extra=about(part.job_id))
    return True
