"""Full-parameter fine-tuning of models far larger than the GPU, on the user's own machines."""

from windlass.actors.offload import CannotOffloadError as CannotOffloadError
from windlass.actors.offload import OffloadClosedError as OffloadClosedError
from windlass.actors.offload import OffloadConfig as OffloadConfig
from windlass.actors.offload import OffloadError as OffloadError
from windlass.actors.offload import OffloadFailedError as OffloadFailedError
from windlass.actors.offload import OffloadMisuseError as OffloadMisuseError
from windlass.actors.offload import ParamsAwayError as ParamsAwayError
from windlass.actors.offload import offload as offload

__version__: str
