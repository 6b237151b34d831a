"""Writes files that survive a power loss, measures their real sizes, and describes how child processes ended."""

from windlass.storage.files.allocated_size import backed_nbytes as backed_nbytes
from windlass.storage.files.durable import sync_path as sync_path
from windlass.storage.files.durable import sync_tree as sync_tree
from windlass.storage.files.durable import write_durably as write_durably
from windlass.storage.files.process_end import describe_process_end as describe_process_end
from windlass.storage.files.process_end import explain_process_end as explain_process_end
from windlass.storage.files.process_end import last_line as last_line
from windlass.storage.files.process_end import tells_of_no_memory as tells_of_no_memory
