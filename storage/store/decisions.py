"""The log of a job's decided commits: a small file that grows by a checksummed record for each commit.

A commit is decided once all SSDs of all boxes of the job have it. The log lies in the job's folder on the lead box.
"""

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from windlass.storage.files import sync_path
from windlass.storage.ids import Attempt, LayoutEpoch, Step
from windlass.storage.integrity import is_intact, seal
from windlass.storage.store.format import CommitRecord

DECISIONS_FILE = "decisions"  # in the job's folder

_RECORD = struct.Struct("<8sQQQQ")  # magic, step, attempt, layout epoch, digest of the trainer's state
_RECORD_NBYTES = 64
_MAGIC = b"WNDLDCSN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The fact that every SSD of a job has committed a step. From then on the step before may be overwritten."""

    step: Step
    attempt: Attempt
    epoch: LayoutEpoch
    digest: int  # XXH3 (64 bits, no seed) of the trainer's state

    @classmethod
    def make(cls, *, step: Step, attempt: Attempt, epoch: LayoutEpoch, trainer_state: str) -> Self:
        """Returns the decision on a step with this trainer's state."""
        return cls(step=step, attempt=attempt, epoch=epoch, digest=digest_of(trainer_state))

    @classmethod
    def of(cls, record: CommitRecord) -> Self:
        """Returns the decision on the commit that an SSD has a record of."""
        return cls.make(
            step=record.step, attempt=record.attempt, epoch=record.epoch, trainer_state=record.trainer_state
        )


def digest_of(trainer_state: str) -> int:
    """Returns the digest of a trainer's state in a decision."""
    return xxhash.xxh3_64_intdigest(trainer_state.encode())


def last_decision(path: Path) -> Decision | None:
    """Returns the decision on the latest step in a log, None if there is none. Torn and damaged records do not count.

    It is not always the last record, because an older attempt may append late. Decisions of a later layout epoch count
    before all others. Of two decisions on a step, that of the later attempt counts.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    records = (raw[start : start + _RECORD_NBYTES] for start in range(0, len(raw), _RECORD_NBYTES))
    decisions = (_unpack(record) for record in records if len(record) == _RECORD_NBYTES and is_intact(record, _MAGIC))
    return max(decisions, key=lambda each: (each.epoch, each.step, each.attempt), default=None)


class DecisionLog:
    """Appends decisions to a job's log. One thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the log. Fills up a record that a crash has torn, so that later ones are whole."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if torn := os.fstat(self._fd).st_size % _RECORD_NBYTES:
                self._write(bytes(_RECORD_NBYTES - torn))
            os.fsync(self._fd)
            sync_path(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, decision: Decision) -> None:
        """Appends a decision. It is durable when the call returns.

        Raises:
            OSError: it may or may not be in the log. Nothing more may be appended until the log is opened again.
        """
        record = _RECORD.pack(_MAGIC, decision.step, decision.attempt, decision.epoch, decision.digest)
        self._write(seal(record, _RECORD_NBYTES))
        os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, raw: bytes) -> None:
        if (written := os.write(self._fd, raw)) != len(raw):
            raise OSError(errno.ENOSPC, f"{self.path} was cut at {written} of {len(raw)} bytes: the disk is full")


def _unpack(raw: bytes) -> Decision:
    _, step, attempt, epoch, digest = _RECORD.unpack_from(raw)
    return Decision(step=Step(step), attempt=Attempt(attempt), epoch=LayoutEpoch(epoch), digest=digest)
