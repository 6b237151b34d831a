"""The tensor store: copy-on-write states of chunks, commits, and scratch space."""

from windlass.storage.store.common_commit import last_common_commit as last_common_commit
from windlass.storage.store.format import CommitRecord as CommitRecord
from windlass.storage.store.format import StoreGeometry as StoreGeometry
from windlass.storage.store.job_space import JobSpace as JobSpace
from windlass.storage.store.regions import Region as Region
from windlass.storage.store.scratch import Scratch as Scratch
from windlass.storage.store.scratch import scratch_demand as scratch_demand
from windlass.storage.store.tensor_store import TensorStore as TensorStore
from windlass.storage.store.tensor_store import last_attempt as last_attempt
from windlass.storage.store.tensor_store import stored_geometry as stored_geometry
