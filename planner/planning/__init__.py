"""Makes the plan of a job: searches a plan that fits, corrects it by measured steps, and reports it."""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
