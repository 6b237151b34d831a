"""Writes files that survive a power loss, locks and hashes files, keeps results, and measures real sizes."""

from windlass.storage.files.allocated_size import backed_nbytes as backed_nbytes
from windlass.storage.files.durable import sync_path as sync_path
from windlass.storage.files.durable import sync_tree as sync_tree
from windlass.storage.files.durable import write_atomically as write_atomically
from windlass.storage.files.durable import write_durably as write_durably
from windlass.storage.files.file_hashes import FileChangedError as FileChangedError
from windlass.storage.files.file_hashes import FileHashes as FileHashes
from windlass.storage.files.file_hashes import hash_file as hash_file
from windlass.storage.files.locks import lock as lock
from windlass.storage.files.locks import locked as locked
from windlass.storage.files.locks import open_lock_file as open_lock_file
from windlass.storage.files.locks import try_lock as try_lock
from windlass.storage.files.locks import unlock as unlock
from windlass.storage.files.result_cache import ResultCache as ResultCache
