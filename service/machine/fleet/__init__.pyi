"""The boxes of a service as all its parts see them: what a box is made of, what is free on it, and what both sides say.

A *box* is a machine with a home, a dispatcher, a database and a Ray of its own. The *head* is the box with the API and
the queue. A box works on the jobs that the head gives it, and reports what becomes of them.
"""

from windlass.service.machine.fleet.facts import HEAD_NAME as HEAD_NAME
from windlass.service.machine.fleet.facts import BoxFacts as BoxFacts
from windlass.service.machine.fleet.facts import Finding as Finding
from windlass.service.machine.fleet.facts import GpuFacts as GpuFacts
from windlass.service.machine.fleet.facts import SsdFacts as SsdFacts
from windlass.service.machine.fleet.facts import is_away as is_away
from windlass.service.machine.fleet.messages import CapacityReport as CapacityReport
from windlass.service.machine.fleet.messages import InstructionMessage as InstructionMessage
from windlass.service.machine.fleet.messages import SsdSpaceReport as SsdSpaceReport
from windlass.service.machine.fleet.messages import SyncReply as SyncReply
from windlass.service.machine.fleet.messages import SyncRequest as SyncRequest
