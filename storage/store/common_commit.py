"""Decides at which commit a job resumes: the newest that all its SSDs have."""

from collections.abc import Sequence

from windlass.storage.integrity import StoreCorrupt
from windlass.storage.store.format import CommitRecord


def last_common_commit(records: Sequence[Sequence[CommitRecord]]) -> CommitRecord | None:
    """Returns the newest commit that all SSDs of a job have, None if there never was one.

    `records`: the journal of each SSD; without SSDs there is never a commit. Records of different attempts never match,
    because their states may have different histories.

    Raises:
        StoreCorrupt: there must have been a common commit, because an SSD is past the first step, but it is missing.
    """
    if not records:
        return None
    common = set.intersection(*({record.identity for record in journal} for journal in records))
    if not common:
        last_steps = [max((record.step for record in journal), default=None) for journal in records]
        if any(last_steps):  # step 1 is written only after step 0 is committed on every SSD
            raise StoreCorrupt(
                f"the last commits of the job's SSDs, in their order, are those of the steps {last_steps}, and none is "
                "the same on all: an SSD has lost its journal, or is not the one that the job used; put the right one "
                "in its place, or start again from a checkpoint"
            )
        return None
    newest = max(common)
    return next(record for record in records[0] if record.identity == newest)
