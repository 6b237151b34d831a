"""Settings of PyTorch's GPU allocator for processes that compute a model. PyTorch reads them when it is imported."""

from collections.abc import Mapping

# The first is of PyTorch 2.9 and later; the second is older and still works.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of such a process: those in `environment`, or the default if there are none.

    Activations of many sizes come and go in each step. With expandable segments their gaps do not add up: the allocator
    maps freed pages elsewhere, so that it reserves little more than it gave out.
    """
    chosen = {name: environment[name] for name in _VARIABLES if name in environment}
    return chosen or {_VARIABLES[0]: "expandable_segments:True"}
