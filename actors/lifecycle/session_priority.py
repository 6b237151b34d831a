"""Priority of a session's processes together.

Where the kernel groups processes by session (autogroup, `sched(7)`), each session gets the same share of the cores, and
niceness counts only within a session. Then the service's API waits for every core that a job computes on, however nice
the job is. So sessions that compute get a niceness of their own.
"""

import time
from pathlib import Path

# The niceness of processes and sessions that compute for jobs, so that the service's own processes and the person at
# the machine get the cores first.
COMPUTING_NICENESS = 10

_NUM_TRIES = 20
_PAUSE_S = 0.1  # the kernel accepts one change of all unprivileged processes in this time


def lower_session(pid: int, niceness: int = COMPUTING_NICENESS) -> bool:
    """Makes the session of a process yield the cores to other sessions; returns False if the kernel has no such groups.

    Niceness within the session stays as it is.
    """
    for _ in range(_NUM_TRIES):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        except OSError:
            return False
        else:
            return True
    return False
