"""The errors of the database's tables. All of them can be pickled."""


class NotFound(Exception):
    """There is no row of this kind with this id."""

    def __init__(self, kind: str, row_id: str) -> None:
        super().__init__(kind, row_id)
        self.kind, self.row_id = kind, row_id

    def __str__(self) -> str:
        return f"there is no {self.kind} {self.row_id!r}"


class NewerDatabase(Exception):
    """A newer version of windlass has migrated the database."""

    def __init__(self, revision: str) -> None:
        super().__init__(revision)
        self.revision = revision

    def __str__(self) -> str:
        return (
            f"the database has schema {self.revision}, which this version of windlass does not know: a newer one has "
            "used it; start that one, or restore a backup from before"
        )


class DamagedDatabase(Exception):
    """The database's file is damaged."""

    def __init__(self, path: str, found: str) -> None:
        super().__init__(path, found)
        self.path, self.found = path, found

    def __str__(self) -> str:
        return f"the database {self.path} is damaged ({self.found})"


class StatusConflict(Exception):
    """The job's status or attempt is not the one that a change expects; nothing was written."""

    def __init__(self, job_id: str, expected: str, actual: str) -> None:
        super().__init__(job_id, expected, actual)
        self.job_id, self.expected, self.actual = job_id, expected, actual

    def __str__(self) -> str:
        return f"job {self.job_id} was expected to be {self.expected} but is {self.actual}"


class JournalError(Exception):
    """A journal's records are inconsistent; none of the batch was imported."""

    def __init__(self, job_id: str, reason: str) -> None:
        super().__init__(job_id, reason)
        self.job_id, self.reason = job_id, reason

    def __str__(self) -> str:
        return f"the journal of job {self.job_id} cannot be imported: {self.reason}"
