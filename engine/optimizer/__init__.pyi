"""The optimizer's kernels and formulas: Adam's update, norms, learning rates, split states."""

from windlass.engine.optimizer.adam_formulas import AdamSettings as AdamSettings
from windlass.engine.optimizer.adam_kernel import ChunkStates as ChunkStates
from windlass.engine.optimizer.adam_kernel import OptimizerKernel as OptimizerKernel
from windlass.engine.optimizer.grad_norm import NormInParts as NormInParts
from windlass.engine.optimizer.grad_norm import portable_squared_norms as portable_squared_norms
from windlass.engine.optimizer.grad_norm import squared_norm as squared_norm
from windlass.engine.optimizer.kernel_cache import KernelUnavailable as KernelUnavailable
from windlass.engine.optimizer.kernel_set import KernelSet as KernelSet
from windlass.engine.optimizer.lr_schedule import learning_rate as learning_rate
from windlass.engine.optimizer.saved_states import MOMENTS as MOMENTS
from windlass.engine.optimizer.saved_states import SavedStates as SavedStates
from windlass.engine.optimizer.saved_states import from_saved as from_saved
from windlass.engine.optimizer.saved_states import saved_dtype as saved_dtype
from windlass.engine.optimizer.saved_states import to_saved as to_saved
from windlass.engine.optimizer.saved_states import weight_kind as weight_kind
from windlass.engine.optimizer.scratch_sizes import NORM_SCRATCH_NBYTES as NORM_SCRATCH_NBYTES
from windlass.engine.optimizer.scratch_sizes import update_scratch_nbytes as update_scratch_nbytes
from windlass.engine.optimizer.split_states import split_master as split_master
from windlass.engine.optimizer.stochastic_rounding import element_position as element_position
