"""The Prometheus metrics of boxes."""

import time
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from windlass.service.api.routes.boxes.overview import BoxView


def metrics_of_boxes(views: Sequence[BoxView]) -> Iterator[Metric]:
    """Yields the metrics of each box, the head included. What a box has not told is left out."""
    gauges = {
        name: GaugeMetricFamily(f"windlass_box_{name}", what, labels=["box"])
        for name, what in (
            ("up", "1 while a box calls and was not removed, else 0"),
            ("draining", "1 while a box gets no jobs because it was drained, else 0"),
            ("seen_seconds", "Age of a box's last call; 0 for the head"),
            ("devices", "GPUs of a box, or the devices that its CPU counts as"),
            ("devices_used", "Devices of the jobs that run on a box"),
            ("memory_bytes", "Memory of a box"),
            ("memory_free_bytes", "Memory of a box that further jobs could have for their buffers"),
        )
    }
    jobs = GaugeMetricFamily("windlass_box_jobs", "Unfinished jobs on a box", labels=["box", "state"])
    for view in views:
        for name, value in _values_of(view):
            gauges[name].add_metric([view.name], value)
        for state, on_box in (("running", view.running), ("waiting", view.waiting), ("paused", view.paused)):
            jobs.add_metric([view.name, state], len(on_box))
    yield from (*gauges.values(), jobs)
    yield from _of_ssds(views)


def _values_of(view: BoxView) -> Iterator[tuple[str, float]]:
    yield "up", float(not view.is_away and not view.is_removed)
    yield "draining", float(view.is_draining)
    yield "seen_seconds", 0.0 if view.row is None else max(0.0, time.time() - view.row.seen_at)
    yield "devices", view.num_devices
    yield "devices_used", view.num_used_devices
    if view.facts is not None:
        yield "memory_bytes", view.facts.memory_nbytes
    if view.free_memory_nbytes is not None:
        yield "memory_free_bytes", view.free_memory_nbytes


def _of_ssds(views: Sequence[BoxView]) -> Iterator[Metric]:
    labels = ["box", "ssd"]
    total = GaugeMetricFamily("windlass_box_ssd_bytes", "Size of an SSD of a box", labels=labels)
    free = GaugeMetricFamily("windlass_box_ssd_free_bytes", "Free on an SSD of a box", labels=labels)
    rated = GaugeMetricFamily("windlass_box_ssd_rated_bytes", "Bytes written that an SSD is rated for", labels=labels)
    written = CounterMetricFamily("windlass_box_ssd_written_bytes", "Written to an SSD by jobs so far", labels=labels)
    for view in views:
        for index, ssd in enumerate(view.ssds):
            at = [view.name, str(index)]
            total.add_metric(at, ssd.total_nbytes)
            free.add_metric(at, ssd.free_nbytes)
            if ssd.rated_nbytes is not None:
                rated.add_metric(at, ssd.rated_nbytes)
            if ssd.written_nbytes is not None:
                written.add_metric(at, ssd.written_nbytes)
    yield from (total, free, rated, written)
