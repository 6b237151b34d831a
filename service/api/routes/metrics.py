"""`/metrics` for Prometheus: jobs, the queue, running jobs, boxes and requests. Rows are read at each scrape.

If several homes share a database, each home reports the jobs that run in it, so that none is reported twice. Every home
reports the same counts by status and the same queue, because these are of the whole database.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.service.api import CallerDep
from windlass.service.api.routes.boxes import metrics_of_boxes, view_boxes
from windlass.service.installation import Settings, node_of
from windlass.service.machine.fleet import FactsHere
from windlass.service.validation import ApiError
from windlass.storage.sql import Database, Job, JobStatus
from windlass.storage.sql.repositories import EventRepository, JobRepository, Role
from windlass.storage.ssd import is_device_path

# Gauges of a running job's last step: the metric's name, its description, and its key in the step's metrics.
_OF_STEP = (
    ("train_loss", "Loss of the last reported step", "train_loss"),
    ("valid_loss", "Loss of the last evaluation", "valid_loss"),
    ("tokens_per_second", "Target tokens trained on in a second, in the last step", "tokens_per_s"),
    ("step_seconds", "Length of the last step", "step_s"),
    ("remaining_seconds", "Expected until the last step is over", "remaining_s"),
)
# Clients can send any word as method, so others count as unknown.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_UNKNOWN = "unknown"

router = APIRouter()


class RequestMetrics:
    """Counts this process's answered requests by route.

    Paths are no labels, because clients can send any number of them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route")
        self._requests = Counter(
            "windlass_http_requests", "Requests answered", (*labels, "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "windlass_http_request_seconds", "From a request to the begin of its answer", labels, registry=self.registry
        )

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts one answered request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)


class RequestMetricsMiddleware:
    """Counts requests and measures the time until an answer begins, because an event stream does not end."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", _UNKNOWN)
                method = scope["method"] if scope["method"] in _METHODS else _UNKNOWN
                self._metrics.note(method, route, message["status"], time.perf_counter() - start_s)
            await send(message)

        await self._app(scope, receive, send_noted)


class JobCollector(Collector):
    """Reads the metrics of jobs and boxes from the database."""

    def __init__(self, database: Database, settings: Settings, facts: FactsHere) -> None:
        """Takes the `facts` of this box, the head of the others."""
        self._database = database
        self._settings = settings
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics, read in one transaction."""
        here = self._facts.read()
        with self._database.read() as session:
            jobs, events = JobRepository(session), EventRepository(session)
            counts, oldest_s = jobs.count_by_status(), jobs.oldest_queued_at()
            running = jobs.with_status(JobStatus.RUNNING, JobStatus.PAUSING, node=node_of(self._settings.home))
            last = events.last_metrics([job.id for job in running])
            boxes = view_boxes(session, self._settings, here)
        by_status = GaugeMetricFamily("windlass_jobs", "Jobs in the database, by status", labels=["status"])
        for status in JobStatus:
            by_status.add_metric([status.value], counts.get(status, 0))
        yield by_status
        waiting_s = 0.0 if oldest_s is None else max(0.0, time.time() - oldest_s)
        yield GaugeMetricFamily(
            "windlass_queue_oldest_seconds", "Age of the oldest queued job in the database", value=waiting_s
        )
        yield from _of_running(running, last)
        yield from self._of_disks()
        yield from metrics_of_boxes(boxes)

    def _of_disks(self) -> Iterator[Metric]:
        free = GaugeMetricFamily("windlass_disk_free_bytes", "Free on a file system", labels=["path"])
        for path in (self._settings.home, *self._settings.ssd_dirs):
            if path.is_dir() and not is_device_path(path):
                free.add_metric([str(path)], shutil.disk_usage(path).free)
        yield free
        rated = GaugeMetricFamily("windlass_ssd_rated_bytes", "Bytes written that an SSD is rated for", labels=["ssd"])
        for index, nbytes in enumerate(self._settings.ssd_endurance_nbytes):
            rated.add_metric([str(index)], nbytes)
        yield rated


def _of_running(running: Sequence[Job], last: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    steps = GaugeMetricFamily("windlass_job_step", "Steps that a running job has committed", labels=["job"])
    total = GaugeMetricFamily("windlass_job_steps", "Steps of a running job", labels=["job"])
    attempts = GaugeMetricFamily("windlass_job_attempt", "Attempt that runs", labels=["job"])
    for job in running:
        steps.add_metric([job.id], job.step)
        total.add_metric([job.id], job.total_steps or 0)
        attempts.add_metric([job.id], job.attempt)
    yield from (steps, total, attempts)
    for name, what, key in _OF_STEP:
        family = GaugeMetricFamily(f"windlass_job_{name}", what, labels=["job"])
        for job_id, data in last.items():
            if data.get(key) is not None:
                family.add_metric([job_id], data[key])
        yield family
    share = GaugeMetricFamily(
        "windlass_job_busy_ratio", "Share of the last step in which a resource was busy", labels=["job", "resource"]
    )
    moved = GaugeMetricFamily("windlass_job_step_bytes", "Moved in the last step", labels=["job", "resource"])
    written = CounterMetricFamily(
        "windlass_job_ssd_written_bytes", "Written to an SSD by a job so far, by all attempts", labels=["job", "ssd"]
    )
    for job_id, data in last.items():
        timeline = data.get("timeline") or {}
        for resource, busy_s in timeline.get("busy_s", {}).items():
            share.add_metric([job_id, resource], busy_s / timeline["period_s"])
        for resource, nbytes in timeline.get("moved_bytes", {}).items():
            moved.add_metric([job_id, resource], nbytes)
        for index, nbytes in enumerate(data.get("ssd_bytes_written_by_ssd", ())):
            written.add_metric([job_id, str(index)], nbytes)
    yield from (share, moved, written)


@router.get("/metrics", include_in_schema=False)
def show_metrics(request: Request, caller: CallerDep) -> Response:
    """Returns the metrics in the format that the scraper requests, Prometheus or OpenMetrics.

    Only administrators see them.
    """
    if caller.role is not Role.ADMIN:
        raise ApiError("metrics are for admins", status=403, code="permission_denied")
    requests: RequestMetrics = request.app.state.request_metrics
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(requests.registry), headers={"Content-Type": content_type})
