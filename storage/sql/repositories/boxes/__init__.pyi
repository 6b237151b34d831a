"""The boxes of a service, the jobs that they work on, and their parts of jobs over several boxes."""

from windlass.storage.sql.repositories.boxes.mirror import JobReport as JobReport
from windlass.storage.sql.repositories.boxes.mirror import MirroredCheckpoint as MirroredCheckpoint
from windlass.storage.sql.repositories.boxes.mirror import MirroredEvent as MirroredEvent
from windlass.storage.sql.repositories.boxes.mirror import MirrorRepository as MirrorRepository
from windlass.storage.sql.repositories.boxes.mirror import job_of_row as job_of_row
from windlass.storage.sql.repositories.boxes.parts import HELD_FOR_PART as HELD_FOR_PART
from windlass.storage.sql.repositories.boxes.parts import PartRepository as PartRepository
from windlass.storage.sql.repositories.boxes.parts import PartState as PartState
from windlass.storage.sql.repositories.boxes.parts import holds as holds
from windlass.storage.sql.repositories.boxes.parts import is_reserved as is_reserved
from windlass.storage.sql.repositories.boxes.rows import AWAY_AFTER_S as AWAY_AFTER_S
from windlass.storage.sql.repositories.boxes.rows import HEAD_ID as HEAD_ID
from windlass.storage.sql.repositories.boxes.rows import BoxRepository as BoxRepository
from windlass.storage.sql.repositories.boxes.rows import BoxState as BoxState
from windlass.storage.sql.repositories.boxes.rows import Instruction as Instruction
from windlass.storage.sql.repositories.boxes.rows import is_away as is_away
from windlass.storage.sql.repositories.boxes.rows import told_lease_s as told_lease_s
