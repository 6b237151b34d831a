"""Shared memory: arenas and their slots, pages and NUMA nodes, the space left, and how processes ended without it."""

from windlass.storage.memory.arena import ALIGNMENT_NBYTES as ALIGNMENT_NBYTES
from windlass.storage.memory.arena import Arena as Arena
from windlass.storage.memory.arena import SlotPool as SlotPool
from windlass.storage.memory.arena import arena_path as arena_path
from windlass.storage.memory.arena import arenas_in as arenas_in
from windlass.storage.memory.arena import remove_leftovers as remove_leftovers
from windlass.storage.memory.capacity import InsufficientSpaceError as InsufficientSpaceError
from windlass.storage.memory.capacity import RoomLostError as RoomLostError
from windlass.storage.memory.capacity import arena_room_nbytes as arena_room_nbytes
from windlass.storage.memory.capacity import directory_free_nbytes as directory_free_nbytes
from windlass.storage.memory.capacity import directory_nbytes as directory_nbytes
from windlass.storage.memory.capacity import is_out_of_space as is_out_of_space
from windlass.storage.memory.capacity import may_find_room_later as may_find_room_later
from windlass.storage.memory.capacity import memory_available_nbytes as memory_available_nbytes
from windlass.storage.memory.capacity import require_arena_room as require_arena_room
from windlass.storage.memory.capacity import require_disk_room as require_disk_room
from windlass.storage.memory.numa import has_several_nodes as has_several_nodes
from windlass.storage.memory.numa import node_near as node_near
from windlass.storage.memory.numa import parse_cpu_list as parse_cpu_list
from windlass.storage.memory.process_end import describe_process_end as describe_process_end
from windlass.storage.memory.process_end import explain_process_end as explain_process_end
from windlass.storage.memory.process_end import is_out_of_memory as is_out_of_memory
from windlass.storage.memory.process_end import last_line as last_line
from windlass.storage.memory.process_end import reports_out_of_memory as reports_out_of_memory
