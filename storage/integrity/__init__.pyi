"""Checksums, checksummed records, and the errors of stores."""

from windlass.storage.integrity.checksum import GRANULE_NBYTES as GRANULE_NBYTES
from windlass.storage.integrity.checksum import buffer_digest as buffer_digest
from windlass.storage.integrity.checksum import granule_digests as granule_digests
from windlass.storage.integrity.errors import DirectIoRefused as DirectIoRefused
from windlass.storage.integrity.errors import StaleAttempt as StaleAttempt
from windlass.storage.integrity.errors import StepNotAllowed as StepNotAllowed
from windlass.storage.integrity.errors import StoreCorrupt as StoreCorrupt
from windlass.storage.integrity.errors import StoreError as StoreError
from windlass.storage.integrity.errors import StoreExists as StoreExists
from windlass.storage.integrity.errors import StoreIoError as StoreIoError
from windlass.storage.integrity.errors import StoreMissing as StoreMissing
from windlass.storage.integrity.records import RECORD_NBYTES as RECORD_NBYTES
from windlass.storage.integrity.records import is_intact as is_intact
from windlass.storage.integrity.records import seal as seal
