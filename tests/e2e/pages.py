"""Helpers for tests of the page in a browser."""

from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, expect

PATIENCE_MS = 15_000
OpenPage = Callable[..., Page]

# Seconds, in the summary of a step's timeline.
TIMELINE: dict[str, Any] = {
    "period_s": 6.6,
    "busy_s": {"gpu-0/compute": 5.94, "gpu-0/h2d": 1.32, "gpu-0/d2h": 0.66, "optimizer-0": 6.27, "ssd-0": 3.3},
    "stall_s": {"update": 0.528, "commit": 0.132},
    "busiest": "optimizer-0",
    "overlap_efficiency": 0.95,
    "dependency_bound_s": 4.4,
}

expect.set_options(timeout=PATIENCE_MS)
