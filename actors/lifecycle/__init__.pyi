"""The life of an actor's threads and processes: their names, cores, locks, and stop requests."""

from windlass.actors.lifecycle.absent_packages import UNUSED_BY_MODELS as UNUSED_BY_MODELS
from windlass.actors.lifecycle.absent_packages import hide_packages as hide_packages
from windlass.actors.lifecycle.attempt_lock import begin_attempt as begin_attempt
from windlass.actors.lifecycle.attempt_lock import close_attempt as close_attempt
from windlass.actors.lifecycle.attempt_lock import has_begun as has_begun
from windlass.actors.lifecycle.attempt_lock import join_attempt as join_attempt
from windlass.actors.lifecycle.attempt_lock import kill_attempt as kill_attempt
from windlass.actors.lifecycle.attempt_lock import last_sign_of_life as last_sign_of_life
from windlass.actors.lifecycle.attempt_lock import tell_alive as tell_alive
from windlass.actors.lifecycle.cpu_affinity import WAIT_POLICY as WAIT_POLICY
from windlass.actors.lifecycle.cpu_affinity import bind_optimizer as bind_optimizer
from windlass.actors.lifecycle.cpu_affinity import cores_of as cores_of
from windlass.actors.lifecycle.cpu_affinity import numa_nodes as numa_nodes
from windlass.actors.lifecycle.gpu_allocator import allocator_settings as allocator_settings
from windlass.actors.lifecycle.parent_death import die_with_parent as die_with_parent
from windlass.actors.lifecycle.report_timer import ReportTimer as ReportTimer
from windlass.actors.lifecycle.report_timer import StartReport as StartReport
from windlass.actors.lifecycle.session_priority import COMPUTING_NICENESS as COMPUTING_NICENESS
from windlass.actors.lifecycle.session_priority import lower_session as lower_session
from windlass.actors.lifecycle.stop_request import StopRequest as StopRequest
from windlass.actors.lifecycle.threads import NICENESS_BESIDE_COMPUTE as NICENESS_BESIDE_COMPUTE
from windlass.actors.lifecycle.threads import ActorThreads as ActorThreads
from windlass.actors.lifecycle.threads import working_at as working_at
from windlass.actors.lifecycle.threads import works_at as works_at
