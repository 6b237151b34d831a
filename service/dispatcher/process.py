"""The dispatcher as a process: a Ray driver, restarted by the supervisor or by the container runtime."""

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import ray
from sqlalchemy.exc import SQLAlchemyError

from windlass.actors.job import JobSpec
from windlass.actors.runtime import ray_runner as deploy
from windlass.actors.runtime.boxes import LinkConfig, start_box_runner, start_first_box_runner
from windlass.actors.runtime.moving import MoveSpec, start_move_runner
from windlass.service.dispatcher.dispatcher import Dispatcher
from windlass.service.dispatcher.lease import Lease
from windlass.service.dispatcher.replanner import ask_planner, ask_stages
from windlass.service.dispatcher.runners import RunnerLostError
from windlass.service.installation import DispatcherLock, Settings, boot_id, node_of
from windlass.service.jobs import MachineResources
from windlass.service.machine import RayCluster, RayNode
from windlass.service.preparation import preparation_of, step_server
from windlass.service.webhooks import WebhookSender
from windlass.storage.ids import Attempt, JobId
from windlass.storage.sql import Database, why_unavailable

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 0.5
# Longest interval between passes while the database is unavailable. The interval doubles each time.
_MAX_INTERVAL_S = 5.0
# Interval while a job is prepared, because each step of the preparation waits for the next pass.
_SHORT_INTERVAL_S = 0.1


class RayLostError(RuntimeError):
    """The Ray daemon, or this machine's node of a cluster, has ended while this process was connected to it."""


class RayRunners:
    """Runners as detached actors of the Ray cluster that this process is connected to."""

    def start(self, spec: JobSpec) -> None:
        """Launches a job's runner. Raises RunnerLostError if Ray fails, else the runner's own error."""
        self._launch(deploy.start_runner, spec)

    def start_first_part(self, specs: Sequence[JobSpec], config: LinkConfig) -> None:
        """Launches the first box's runner of a job over several boxes. Raises as `start`."""
        self._launch(start_first_box_runner, specs, config)

    def start_part(self, spec: JobSpec, config: LinkConfig) -> None:
        """Launches another box's runner of a job over several boxes. Raises as `start`."""
        self._launch(start_box_runner, spec, config)

    def start_move(self, move: MoveSpec, config: LinkConfig) -> None:
        """Launches one box's runner of a move. Raises as `start`."""
        self._launch(start_move_runner, move, config)

    @staticmethod
    def _launch(launch: Callable[..., None], *arguments: object) -> None:
        try:
            launch(*arguments)
        except ray.exceptions.RayTaskError:
            raise  # an error of the runner itself
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise RunnerLostError(f"its runner did not start ({error})") from error

    def is_alive(self, job: JobId, attempt: Attempt) -> bool:
        """Returns whether the job's runner exists."""
        return deploy.find_runner(job, attempt) is not None

    def cancel(self, job: JobId, attempt: Attempt) -> None:
        """Requests the job's runner to end the job after its step."""
        deploy.cancel_runner(job, attempt)

    def pause(self, job: JobId, attempt: Attempt) -> None:
        """Requests the job's runner to end the attempt after its step."""
        deploy.pause_runner(job, attempt)

    def kill(self, job: JobId, attempt: Attempt) -> None:
        """Kills the job's runner; its other actors die with it."""
        runner = deploy.find_runner(job, attempt)
        if runner is not None:
            ray.kill(runner)


def run_dispatcher(settings: Settings) -> None:
    """Dispatches jobs until SIGTERM.

    Raises RayLostError, after which a new process with a new Ray must start, and RayStartError without a Ray to run
    jobs on.
    """
    ending = threading.Event()

    def end(_signum: int, _frame: FrameType | None) -> None:
        ending.set()

    ray_connection, resources = _connect(settings)
    # After the connection, because Ray sets its own handlers when it connects.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, end)
    lock = DispatcherLock(settings.home)
    while not lock.try_acquire():
        _LOG.info("another dispatcher of this home has not ended yet")
        if ending.wait(_INTERVAL_S):
            return
    database = Database(settings.database_url)
    lease = Lease(database, node=node_of(settings.home), machine=boot_id(), is_alone=True)
    server = step_server(settings.home / "logs" / "step-server.log")
    dispatcher = Dispatcher(
        database,
        settings,
        RayRunners(),
        resources,
        lease,
        prepare=functools.partial(preparation_of, start=server.start),
        ask=functools.partial(ask_planner, start=server.start),
        ask_over_boxes=functools.partial(ask_stages, start=server.start),
    )
    heartbeat = threading.Thread(target=lease.beat_until, args=(ending,), name="lease", daemon=True)
    heartbeat.start()
    sender = WebhookSender(database, settings)
    sender.start()
    _LOG.info("dispatching")
    try:
        with contextlib.suppress(OSError):  # disk space for its log, or memory, may be available later
            server.begin()
        dispatch_until(ending, dispatcher, ray_connection)
    finally:
        ending.set()
        heartbeat.join()
        sender.close()
        dispatcher.close()
        server.close()
        database.close()


def dispatch_until(ending: threading.Event, dispatcher: Dispatcher, ray_connection: RayCluster | RayNode) -> None:
    """Runs pass after pass, also while the database is unavailable for a while. Raises RayLostError."""
    interval_s = _INTERVAL_S
    while not ending.is_set():
        if not ray_connection.is_running:
            raise RayLostError("Ray has ended here; when it is back, its jobs go on there")
        try:
            dispatcher.tick()
            interval_s = _SHORT_INTERVAL_S if dispatcher.is_preparing else _INTERVAL_S
        except SQLAlchemyError as error:
            if (why := why_unavailable(error)) is None:
                raise
            interval_s = min(2 * max(interval_s, _INTERVAL_S), _MAX_INTERVAL_S)
            _LOG.warning("nothing can be done now, as the database cannot be used: %s (%s)", why, error)
        ending.wait(interval_s)


def _connect(settings: Settings) -> tuple[RayCluster | RayNode, MachineResources]:
    """Connects to this home's Ray daemon or to an external cluster.

    Returns it with the resources that jobs have there.
    """
    if settings.ray_address is not None:
        node = RayNode.join(settings.ray_address, cpu_ranks=settings.cpu_ranks)
        return node, node.resources
    here = MachineResources.here(settings)
    cluster = RayCluster(settings.home)
    cluster.ensure_running(num_cpus=here.num_cores, num_gpus=here.num_gpus, cpu_ranks=here.cpu_ranks)
    cluster.connect()
    # An adopted daemon may be older than a GPU's driver. Jobs get the GPUs that Ray was started with.
    resources = RayNode.of_this_process().resources
    if resources.num_gpus != here.num_gpus:
        _LOG.warning(
            "the driver lists %d GPUs, but Ray was started when there were %d, and jobs get those; "
            "`windlass down` and `windlass up` once no job runs",
            here.num_gpus,
            resources.num_gpus,
        )
    elif resources.num_devices != here.num_devices:
        _LOG.warning(
            "cpu_ranks is %d, but Ray was started with %d devices, and jobs get those; "
            "`windlass down` and `windlass up` once no job runs",
            here.num_devices,
            resources.num_devices,
        )
    return cluster, resources
