"""Jobs over several boxes: the head gives each box a part, and a box serves the attempts of its parts."""

from windlass.service.dispatcher.parts.here import PartsHere as PartsHere
from windlass.service.dispatcher.parts.spread import UNKNOWN_PARTS as UNKNOWN_PARTS
from windlass.service.dispatcher.parts.spread import SpreadJobs as SpreadJobs
