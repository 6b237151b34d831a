"""Full-parameter fine-tuning of models far larger than the GPU, on the user's own machines."""

from windlass.exports import lazy_exports

__version__ = "0.1.0"

# The Python API is imported when it is first used, because most of windlass's processes need no torch.
__getattr__, __dir__ = lazy_exports(__name__, __file__)
