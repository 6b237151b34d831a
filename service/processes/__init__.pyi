"""Starts, supervises and ends the service's processes."""

from windlass.service.processes.launch import start_detached as start_detached
from windlass.service.processes.machine_profile import ensure_measured as ensure_measured
from windlass.service.processes.machine_profile import measure_and_save as measure_and_save
from windlass.service.processes.shutdown import is_box_free as is_box_free
from windlass.service.processes.shutdown import jobs_with_parts as jobs_with_parts
from windlass.service.processes.shutdown import running_jobs as running_jobs
from windlass.service.processes.shutdown import shut_down as shut_down
from windlass.service.processes.supervisor import Supervisor as Supervisor
from windlass.service.processes.supervisor import listening as listening
