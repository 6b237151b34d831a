"""The I/O scheduler of an SSD: the order of transfers, and the writes that a commit waits for."""

from windlass.storage.io_scheduler.requests import CommitRequest as CommitRequest
from windlass.storage.io_scheduler.requests import IoResult as IoResult
from windlass.storage.io_scheduler.requests import IoTerms as IoTerms
from windlass.storage.io_scheduler.scheduler import IoScheduler as IoScheduler
