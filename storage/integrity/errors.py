"""What can go wrong with a tensor store. Every text names the SSD, and the job and the extent where there is one."""


class StoreError(RuntimeError):
    """A tensor store cannot do what was asked; the text says which store and why."""


class StoreCorrupt(StoreError):
    """What lies on the SSD is not what was written there."""


class StoreMissing(StoreError):
    """The SSD holds no states of this job."""


class StoreExists(StoreError):
    """The SSD already holds states of this job."""


class StaleAttempt(StoreError):
    """A newer attempt of the job has taken the store, or the job was deleted; this one may not change it."""


class StepNotAllowed(StoreError):
    """Reading, writing or committing that step would give, or destroy, states of another one."""


class DirectIoRefused(StoreError):
    """The directory's file system cannot read and write past the page cache."""


class StoreIoError(StoreError):
    """The SSD failed to read, write or sync."""
