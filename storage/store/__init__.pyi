"""The tensor store: copy-on-write states of chunks, commits, and scratch space."""

from windlass.storage.store.decisions import DECISIONS_FILE as DECISIONS_FILE
from windlass.storage.store.decisions import Decision as Decision
from windlass.storage.store.decisions import DecisionLog as DecisionLog
from windlass.storage.store.decisions import last_decision as last_decision
from windlass.storage.store.format import CommitRecord as CommitRecord
from windlass.storage.store.format import StoreGeometry as StoreGeometry
from windlass.storage.store.job_space import JobSpace as JobSpace
from windlass.storage.store.job_space import delete_space as delete_space
from windlass.storage.store.job_space import read_journal as read_journal
from windlass.storage.store.job_space import read_space as read_space
from windlass.storage.store.recovery import Recovery as Recovery
from windlass.storage.store.recovery import StoreJournal as StoreJournal
from windlass.storage.store.recovery import recover as recover
from windlass.storage.store.regions import Region as Region
from windlass.storage.store.scratch import scratch_demand as scratch_demand
from windlass.storage.store.tensor_store import TensorStore as TensorStore
from windlass.storage.store.tensor_store import last_attempt as last_attempt
from windlass.storage.store.tensor_store import spaces_in as spaces_in
from windlass.storage.store.tensor_store import stored_geometry as stored_geometry
