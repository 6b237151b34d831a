"""The stored data of this installation: disk usage, deletion and backups."""

from windlass.service.data import deletion as deletion
from windlass.service.data.backup import make_backup as make_backup
from windlass.service.data.backup import restore_backup as restore_backup
from windlass.service.data.disk_usage import Kind as Kind
from windlass.service.data.disk_usage import Tally as Tally
from windlass.service.data.disk_usage import all_that_occupies as all_that_occupies
from windlass.service.data.disk_usage import measure_stored as measure_stored
from windlass.service.data.disk_usage import parts_of_job as parts_of_job
from windlass.service.data.job_remains import free_space as free_space
from windlass.service.data.job_remains import free_states as free_states
from windlass.service.data.job_remains import jobs_with_states as jobs_with_states
from windlass.service.data.job_remains import output_dir as output_dir
from windlass.service.data.job_remains import remove_arenas as remove_arenas
from windlass.service.data.job_remains import remove_states as remove_states
from windlass.service.data.job_remains import states_nbytes as states_nbytes
