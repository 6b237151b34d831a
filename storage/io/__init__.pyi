"""Moves bytes between arenas and SSDs."""

from windlass.storage.io.engines import DEFAULT_IO as DEFAULT_IO
from windlass.storage.io.engines import Backend as Backend
from windlass.storage.io.engines import BlockDevice as BlockDevice
from windlass.storage.io.engines import IoSettings as IoSettings
from windlass.storage.io.engines import Transfer as Transfer
from windlass.storage.io.engines import TransferEngine as TransferEngine
from windlass.storage.io.engines import open_engine as open_engine
from windlass.storage.io.engines import uring_refusal as uring_refusal
