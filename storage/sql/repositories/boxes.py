"""The boxes of a service: codes to join with, boxes, and the instructions that they get."""

import secrets
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import CursorResult, delete, func, select, update
from sqlalchemy.orm import Session

from windlass.storage.sql import Box, BoxInstruction, JoinCode, NotFound


class BoxState(StrEnum):
    """A state that the service keeps of a box. Whether it is away follows from the time of its last call."""

    READY = "ready"
    DRAINING = "draining"  # it gets no jobs, and its attempts end at a commit
    REMOVED = "removed"  # its certificate counts no more; its row stays while jobs name it


class Instruction(StrEnum):
    """Kinds of instructions about a job."""

    TAKE = "take"  # its rows and files are to be fetched, and it is to be worked on
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"


class BoxRepository:
    """Boxes and their instructions, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # --- codes

    def add_code(self, digest: str, *, lasts_s: float) -> None:
        """Stores a new join code by its digest, and forgets codes that expired a day ago or earlier."""
        now = time.time()
        self._session.execute(delete(JoinCode).where(JoinCode.expires_at < now - 86400))
        self._session.add(JoinCode(digest=digest, created_at=now, expires_at=now + lasts_s))
        self._session.flush()

    def use_code(self, digest: str, box_id: str) -> bool:
        """Marks a code as used. Returns False if there is none that is unused and has not expired."""
        now = time.time()
        valid = (JoinCode.digest == digest, JoinCode.used_at.is_(None), JoinCode.expires_at > now)
        statement = update(JoinCode).where(*valid).values(used_at=now, box_id=box_id)
        return self._changes(statement) == 1

    # --- boxes

    def add(self, *, name: str, node: str, certificate: str, address: str, facts: dict[str, Any]) -> Box:
        """Adds a box. The caller has checked that no other box has the name or the home."""
        now = time.time()
        box = Box(
            id=f"box-{secrets.token_hex(12)}",
            name=name,
            node=node,
            state=BoxState.READY.value,
            certificate=certificate,
            address=address,
            joined_at=now,
            seen_at=now,
            facts=facts,
            capacity=None,
        )
        self._session.add(box)
        self._session.flush()
        return box

    def all(self, *, with_removed: bool = False) -> Sequence[Box]:
        """Lists the boxes by name."""
        query = select(Box).order_by(Box.name)
        return self._session.scalars(query if with_removed else query.where(Box.state != BoxState.REMOVED.value)).all()

    def get(self, box_id: str) -> Box:
        """Returns a box. Raises NotFound."""
        box = self._session.get(Box, box_id, populate_existing=True)
        if box is None:
            raise NotFound("box", box_id)
        return box

    def by_name(self, name: str) -> Box | None:
        """Returns the box with this name, removed ones too, or None."""
        return self._session.scalar(select(Box).where(Box.name == name))

    def by_node(self, node: str | None) -> Box | None:
        """Returns the box whose home this is, removed ones too; None if it is no box's, so that it is this home's."""
        return None if node is None else self._session.scalar(select(Box).where(Box.node == node))

    def by_certificate(self, certificate: str) -> Box | None:
        """Returns the box that has this certificate, removed ones too, or None."""
        return self._session.scalar(select(Box).where(Box.certificate == certificate))

    def set(self, box_id: str, **values: Any) -> None:
        """Writes columns of a box."""
        statement = update(Box).where(Box.id == box_id).values(**values)
        if self._changes(statement) != 1:
            raise NotFound("box", box_id)

    # --- instructions

    def instruct(self, box_id: str, job_id: str, kind: Instruction, body: dict[str, Any] | None = None) -> int:
        """Adds an instruction. Returns its ordinal."""
        row = BoxInstruction(box_id=box_id, job_id=job_id, kind=kind.value, body=body or {}, created_at=time.time())
        self._session.add(row)
        self._session.flush()
        return row.ordinal

    def instructions(self, box_id: str, *, after: int = 0, limit: int = 100) -> Sequence[BoxInstruction]:
        """Lists the instructions that a box has not carried out yet, oldest first."""
        query = select(BoxInstruction).where(BoxInstruction.box_id == box_id, BoxInstruction.ordinal > after)
        return self._session.scalars(query.order_by(BoxInstruction.ordinal).limit(limit)).all()

    def instructions_about(self, job_id: str) -> Sequence[BoxInstruction]:
        """Lists the instructions about a job that its box has not carried out yet, oldest first."""
        query = select(BoxInstruction).where(BoxInstruction.job_id == job_id)
        return self._session.scalars(query.order_by(BoxInstruction.ordinal)).all()

    def confirm(self, box_id: str, ordinal: int) -> None:
        """Forgets the instructions up to this one, which the box has carried out."""
        done = (BoxInstruction.box_id == box_id, BoxInstruction.ordinal <= ordinal)
        self._session.execute(delete(BoxInstruction).where(*done))
        last = select(func.max(Box.instruction_done)).where(Box.id == box_id)
        if (self._session.scalar(last) or 0) < ordinal:
            self.set(box_id, instruction_done=ordinal)

    def withdraw(self, ordinal: int) -> bool:
        """Removes an instruction that the box has not carried out. Returns False if it is gone already."""
        return self._changes(delete(BoxInstruction).where(BoxInstruction.ordinal == ordinal)) == 1

    def _changes(self, statement: Any) -> int:
        result = self._session.execute(statement.execution_options(synchronize_session=False))
        assert isinstance(result, CursorResult)
        return result.rowcount
