"""`windlass.offload`: a plain PyTorch loop with its layers' params and optimizer states in host memory or on SSDs."""

from windlass.actors.offload import errors as errors
from windlass.actors.offload.api import offload as offload
from windlass.actors.offload.config import OffloadConfig as OffloadConfig
from windlass.actors.offload.errors import CannotOffloadError as CannotOffloadError
from windlass.actors.offload.errors import OffloadClosedError as OffloadClosedError
from windlass.actors.offload.errors import OffloadError as OffloadError
from windlass.actors.offload.errors import OffloadFailedError as OffloadFailedError
from windlass.actors.offload.errors import OffloadMisuseError as OffloadMisuseError
from windlass.actors.offload.errors import ParamsAwayError as ParamsAwayError
