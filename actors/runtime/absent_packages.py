"""Hides installed packages that a job's processes do not need. Ray imports this module first in each of its workers.

Ray and transformers import some packages whenever these are installed, for features that no job uses. The packages take
7 MiB of each worker (pydantic, starlette: Ray's serialization) and 20 MiB of the GPU worker (scipy: losses of object
detection).
"""

import sys

_UNUSED = ("pydantic", "starlette", "scipy")

for _name in _UNUSED:
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]  # its import then fails like that of an absent package
