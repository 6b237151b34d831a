"""The errors of an I/O scheduler. Errors of the store and its SSD are a `StoreError`."""


class IoOverdueError(TimeoutError):
    """A transfer is not done within its timeout."""


class IoQueueFullError(TimeoutError):
    """A request waited in vain for others to be done, because too many are queued or in flight."""
