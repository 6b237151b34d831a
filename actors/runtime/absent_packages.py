"""Hides packages that a job's processes do not need. Ray imports this module first in each of its workers.

Ray's serialization would import pydantic and starlette, which take 7 MiB of each worker.
"""

from windlass.actors.lifecycle import UNUSED_BY_MODELS, hide_packages

hide_packages(("pydantic", "starlette", *UNUSED_BY_MODELS))
