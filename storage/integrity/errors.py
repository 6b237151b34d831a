"""The errors of tensor stores. Every message names the SSD, and if known the job and the extent."""


class StoreError(RuntimeError):
    """A tensor store cannot carry out a request. The message names the store and the reason."""


class StoreCorrupt(StoreError):
    """The data on the SSD is not the data that was written."""


class StoreMissing(StoreError):
    """The SSD holds no states of this job."""


class StoreExists(StoreError):
    """The SSD already holds states of this job."""


class StaleAttempt(StoreError):
    """A newer attempt of the job owns the store, or the job was deleted. This attempt may not change the store."""


class StepNotAllowed(StoreError):
    """A read, write or commit of that step would return or destroy states of another step."""


class DirectIoRefused(StoreError):
    """The directory's file system cannot read and write past the page cache."""


class StoreIoError(StoreError):
    """The SSD failed to read, write or sync."""
