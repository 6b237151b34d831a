"""The actor that runs the policy, keeps the progress, and writes the journal."""

from windlass.actors.scheduler.scheduler import CANCELLED as CANCELLED
from windlass.actors.scheduler.scheduler import GOES_ON as GOES_ON
from windlass.actors.scheduler.scheduler import INTERRUPTED as INTERRUPTED
from windlass.actors.scheduler.scheduler import PAUSED as PAUSED
from windlass.actors.scheduler.scheduler import ROOM as ROOM
from windlass.actors.scheduler.scheduler import ActorLostError as ActorLostError
from windlass.actors.scheduler.scheduler import Scheduler as Scheduler
from windlass.actors.scheduler.scheduler import job_shape as job_shape
