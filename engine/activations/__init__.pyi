"""Decides for each saved tensor whether it is kept, swapped or recomputed, and carries the decision out."""

from windlass.engine.activations.host_store import ActivationMemoryError as ActivationMemoryError
from windlass.engine.activations.host_store import HostActivations as HostActivations
from windlass.engine.activations.microbatch import Unit as Unit
from windlass.engine.activations.operator_costs import LayerCost as LayerCost
from windlass.engine.activations.operator_costs import list_operators as list_operators
from windlass.engine.activations.saved_graph import BorrowedParams as BorrowedParams
from windlass.engine.activations.selective_recompute import Layer as Layer
from windlass.engine.activations.selective_recompute import as_one_operator as as_one_operator
from windlass.engine.activations.selective_recompute import generators_of as generators_of
from windlass.engine.activations.selective_recompute import storage_ref as storage_ref
from windlass.engine.activations.selective_recompute import tensors_in as tensors_in
from windlass.engine.activations.store import NOTHING_SWAPPED as NOTHING_SWAPPED
from windlass.engine.activations.store import ActivationStore as ActivationStore
from windlass.engine.activations.store import SwapCounter as SwapCounter
from windlass.engine.activations.store import SwapCounts as SwapCounts
from windlass.engine.activations.store import SwapHandle as SwapHandle
from windlass.engine.activations.store import SwapWatch as SwapWatch
from windlass.engine.activations.store import wait_on_device as wait_on_device
