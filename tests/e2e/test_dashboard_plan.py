"""A job's plan on the dashboard, beside the measured steps."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import expect

from benchmarks.api.fill import HYPERPARAMETERS
from tests.e2e.live_service import LiveService
from tests.e2e.pages import TIMELINE, OpenPage
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.span_files import FOLDER, SIMULATED_FOLDER, StepSpans, keep_step
from windlass.service.jobs.spec_builder import job_dir
from windlass.storage.sql.job_status import JobStatus

PLANNED_SUMMARY: dict[str, Any] = {
    "period_s": 6.0,
    "busy_s": {"gpu-0/compute": 5.4, "gpu-0/h2d": 1.2, "optimizer-0": 5.7, "ssd-0": 3.6},
    "stall_s": {},
    "busiest": "optimizer-0",
    "overlap_efficiency": 0.95,
    "dependency_bound_s": 4.0,
}
PLAN: dict[str, Any] = {
    "feasible": True,
    "reasons": ["a step is bound by the update of the parameters on the CPU: 5.5 s, 92% of the step"],
    "step_s": 6.0,
    "bound_s": 5.6,
    "tokens_per_s": 4964.0,
    "bottleneck": "optimizer",
    "busy_s": {"compute": 5.32, "h2d": 1.1, "d2h": 0.6, "ssd": 3.4, "optimizer": 5.5, "host_memory": 2.0},
    "peak_gib": {"gpu": 10.75, "host": 21.5, "ssd": 48.0},
    "peak_limit_gib": {"gpu": 24.0, "host": 60.0, "ssd": 1800.0},
    "engine_gib": {"gpu": 10.0, "host": 20.0, "ssd": 48.0},
    "limit_gib": {"gpu": 22.5, "host": 30.0, "ssd": 900.0},
    "choices": {
        "num_microbatches": 4,
        "group_size": 2,
        "states": [
            {"blocks": "0", "rest_on": "gpu", "in_pieces": False, "grads_on_ssd": False},
            {"blocks": "1-2", "rest_on": "host", "in_pieces": False, "grads_on_ssd": False},
            {"blocks": "3-5", "rest_on": "ssd", "in_pieces": True, "grads_on_ssd": True},
        ],
        "activations": [
            {"layers": "0-2", "kept_mib": 0.0, "swapped_mib": 16.0, "recomputed_mib": 240.0},
            {"layers": "3", "kept_mib": 256.0, "swapped_mib": 0.0, "recomputed_mib": 0.0},
        ],
    },
}
ON_CPU = {"gpu": 11 << 30, "host": 20 << 30, "ssd": 48 << 30}
MEASURED = {"step_s": 6.6, "num_steps": 12, "peak_bytes": {**ON_CPU, "gpu_reserved": 12 << 30}}


def keep_plan(service: LiveService, job_id: str, plan: dict[str, Any], *spans: WorkSpan) -> None:
    """Writes a plan as a job's preparation leaves it, with the spans of a simulated step."""
    folder = job_dir(service.settings, job_id) / "prepare"
    folder.mkdir(parents=True)
    found: dict[str, Any] = {"ok": True, "plan": plan}
    if spans:
        found["simulated"] = {"step_s": plan["step_s"], "summary": PLANNED_SUMMARY}
        simulated = StepSpans(step=4, start_s=0.0, end_s=6.0, summary=PLANNED_SUMMARY, spans=spans)
        keep_step(folder / SIMULATED_FOLDER, simulated)
    (folder / "plan_job.json").write_text(json.dumps(found))


def span(resource: str, kind: SpanKind, start_s: float, end_s: float) -> WorkSpan:
    return WorkSpan(resource, kind, 2, 1, -1, start_s, end_s, 0)


def test_a_plan_and_how_near_the_job_comes_to_it(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.submit()
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#detail-status")).to_have_text("validating files")
    expect(page.locator("#plan-panel")).to_be_hidden()
    keep_plan(service, job_id, PLAN, span("gpu-0/compute", SpanKind.FORWARD, 0.0, 3.0))
    resolved = {"hyperparameters": dict(HYPERPARAMETERS), "total_steps": 10}
    service.move(job_id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, "Files validated", **resolved)
    rows = page.locator("#plan-numbers tr")
    expect(rows).to_have_text(
        ["A step6 s–", "Device memory10.0 GiB–22.5 GiB", "Host buffers20.0 GiB–30.0 GiB", "SSD space48.0 GiB–900 GiB"]
    )
    # Six blocks: four layers between the first block and the last.
    tiers = page.eval_on_selector_all("#plan-states .cell", "cells => cells.map(cell => cell.className)")
    assert tiers == ["cell rest-gpu", *["cell rest-host"] * 2, *["cell rest-ssd in-pieces"] * 3]
    expect(page.locator("#plan-states .cell").nth(3)).to_have_attribute(
        "title", re.compile("block 3, layer 2: .* SSDs")
    )
    fates = page.eval_on_selector_all(
        "#plan-activations .cell", "cells => cells.map(cell => [...cell.children].map(part => part.className))"
    )
    assert fates == [[], *[["swapped", "recomputed"]] * 3, ["kept"], []]
    # In one call, because the page redraws the plan and cells that were found earlier may be detached.
    lefts = page.evaluate(
        """() => ["#plan-states .cell", "#plan-activations .cell"].map(cells =>
            [...document.querySelectorAll(cells)].map(cell => Math.round(cell.getBoundingClientRect().left)))"""
    )
    assert lefts[0] == lefts[1]
    assert lefts[0][0] > 0
    expect(page.locator("#plan-busy .busiest")).to_have_text("the CPU updates92 %")
    expect(page.locator("#plan-reasons li")).to_have_text(PLAN["reasons"])
    expect(page.locator("#plan-note")).to_have_text("The predicted step is an estimate until 3 steps are measured.")
    # The simulated step is shown before any step is measured.
    expect(page.locator("#timeline-title")).to_have_text("Busy in a step, as planned")
    expect(page.locator("#timeline-bars .busiest")).to_have_text("optimizer-095 %")
    expect(page.locator("#timeline-trace")).to_be_hidden()

    service.move(job_id, JobStatus.QUEUED, JobStatus.RUNNING, "Fine-tuning job started", attempt=1)
    service.train(job_id, 1, 2.0, measured={"step_s": None, "num_steps": 0, "peak_bytes": {"host": 20 << 30}})
    expect(rows.nth(2)).to_have_text("Host buffers20.0 GiB20.0 GiB0 %30.0 GiB")
    expect(rows.nth(0)).to_have_text("A step6 s–")
    service.train(job_id, 2, 1.9, measured=MEASURED, timeline=TIMELINE)
    service.validate(job_id, 3, 2.0)  # has no effect on the plan
    expect(rows.nth(0)).to_have_text("A step6 s6.6 s+10 %")
    expect(rows.nth(1)).to_have_text("Device memory10.0 GiB11.0 GiB+10 %22.5 GiB")
    expect(page.locator("#plan-note")).to_have_text("The measured step is the mean of 12 steps.")
    service.train(job_id, 3, 1.8, measured={**MEASURED, "peak_bytes": ON_CPU}, timeline=TIMELINE)
    expect(page.locator("#plan-note")).to_contain_text("of a CPU includes what the worker's process needs for itself")
    recent = {"step_s": 9.0, "num_steps": 9, "step_s_low": 8.5, "step_s_high": 9.5}
    service.train(job_id, 4, 1.7, measured={**MEASURED, "recent": recent}, timeline=TIMELINE)
    expect(rows.nth(1)).to_have_text("The last 9 steps6 s9 s+50 %")
    expect(page.locator("#plan-note")).to_contain_text("The next steps likely take 8.5 to 9.5 s.")


@pytest.mark.long
def test_a_plan_says_how_sure_it_is(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.submit()
    sure = {"step_s_low": 5.2, "step_s_high": 6.9, "times_from": "blocks", "num_compared": 0}
    keep_plan(service, job_id, PLAN | sure)
    resolved = {"hyperparameters": dict(HYPERPARAMETERS), "total_steps": 10}
    service.move(job_id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, "Files validated", **resolved)
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#plan-note")).to_contain_text("It likely takes 5.2 to 6.9 s.")


def test_a_measured_step_is_drawn_beside_the_planned_one(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.run()
    simulated = (span("gpu-0/compute", SpanKind.FORWARD, 0.0, 2.0), span("gpu-0/compute", SpanKind.BACKWARD, 2.0, 6.0))
    keep_plan(service, job_id, PLAN, *simulated, span("ssd-0", SpanKind.READ_STATES, 3.0, 4.5))
    real = (span("gpu-0/compute", SpanKind.FORWARD, 100.0, 103.3), span("ssd-0", SpanKind.WRITE_STATES, 99.0, 101.0))
    step = StepSpans(step=2, start_s=100.0, end_s=106.6, summary=TIMELINE, spans=real)
    keep_step(job_dir(service.settings, job_id) / FOLDER, step)
    service.train(job_id, 2, 1.9, measured=MEASURED, timeline=TIMELINE)
    page = open_page(f"#/jobs/{job_id}")
    bars = page.locator("#timeline-bars li")
    expect(bars).to_have_text(
        [
            "gpu-0 computes90 % · 90 %",
            "gpu-0 copies out10 % · 0 %",
            "gpu-0 copies in20 % · 20 %",
            "optimizer-095 % · 95 %",
            "ssd-050 % · 60 %",
        ]
    )
    expect(page.get_by_label("ssd-0: planned share of the step")).to_have_js_property("value", 0.6)
    expect(page.locator("#timeline-summary")).to_contain_text("The step took 6.6 s;")
    expect(page.locator("#timeline-summary")).to_contain_text("Simulated, it takes 6 s.")
    planned_url = f"/v1/fine_tuning/jobs/{job_id}/plan/timeline"
    expect(page.locator("#timeline-planned-trace")).to_have_attribute("href", planned_url)
    page.click("#lanes summary")
    expect(page.locator("#lanes .lane")).to_have_text(
        ["gpu-0 computesplannedforwardbackward", "measuredforward", "ssd-0plannedstates", "measuredstates"]
    )
    # One scale for both: the longer step fills it. Spans before the step's period are cut off.
    drawn = page.eval_on_selector_all("#lanes path", "paths => paths.map(path => path.getAttribute('d'))")
    per_s = 1000 / 6.6
    assert drawn == [
        f"M0 0H{2 * per_s:.2f}V1H0Z",
        f"M{2 * per_s:.2f} 0H{6 * per_s:.2f}V1H{2 * per_s:.2f}Z",
        "M0 0H500V1H0Z",
        f"M{3 * per_s:.2f} 0H{4.5 * per_s:.2f}V1H{3 * per_s:.2f}Z",
        f"M0 0H{per_s:.2f}V1H0Z",
    ]
    expect(page.locator("#lanes-keys li")).to_have_text(["forward", "backward", "states"])
    expect(page.locator("#lanes-scale")).to_have_text("The rows are 6.6 s long. Measured is step 2.")
    colors = page.eval_on_selector_all("#lanes path", "paths => paths.map(path => getComputedStyle(path).fill)")
    assert len(set(colors)) == 3


def test_a_job_that_does_not_fit_says_what_lacks_and_what_would_do(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.submit()
    reasons = ["no plan fits; it lacks 2.00 GiB of host memory", "it fits with a batch of 4", "it fits with 8 GiB"]
    refused = {"feasible": False, "reasons": reasons, "missing_bytes": {"gpu": 0, "host": 2 << 30, "ssd": 0}}
    keep_plan(service, job_id, refused)
    error = {"code": "does_not_fit", "message": "; ".join(reasons), "param": None}
    service.move(job_id, JobStatus.VALIDATING_FILES, JobStatus.FAILED, "The job failed", error=error)
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#detail-error-code")).to_have_text("does not fit")
    expect(page.locator("#detail-error-message")).to_have_text(reasons[0])
    expect(page.locator("#refusal-missing")).to_have_text("Host buffers2.0 GiB too little")
    expect(page.locator("#refusal-changes li")).to_have_text(reasons[1:])
    expect(page.locator("#plan-panel")).to_be_hidden()
    expect(page.locator("#timeline-panel")).to_be_hidden()


@pytest.mark.long
def test_a_job_without_a_plan_shows_what_it_takes(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.run()
    service.train(job_id, 2, 1.9, measured=MEASURED)
    page = open_page(f"#/jobs/{job_id}", width=390, height=844)
    expect(page.locator("#plan-title")).to_have_text("Measured")
    expect(page.locator("#plan-numbers tr").first).to_have_text("A step–6.6 s")
    expect(page.locator("#plan-details")).to_be_hidden()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


@pytest.mark.long
def test_gpus_of_a_job_are_shown_each_and_how_many_its_plan_chose(service: LiveService, open_page: OpenPage) -> None:
    settings = {"epochs": 3, "precision": "bf16", "learning_rate": None}
    job_id = service.submit(windlass={**settings, "gpus": "auto"})
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#about")).to_contain_text("GPUsauto")
    told = "2 GPUs: 1.9x of one; with 4 it would be 1.9x"
    plan = {**PLAN, "reasons": [*PLAN["reasons"], told], "choices": {**PLAN["choices"], "gpus": 2}}
    keep_plan(service, job_id, plan)
    resolved = {"hyperparameters": {**HYPERPARAMETERS, "gpus": 2}, "total_steps": 10}
    service.move(job_id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, "Files validated", **resolved)
    expect(page.locator("#about")).to_contain_text("GPUs2 (auto)")
    expect(page.locator("#plan-reasons li").last).to_have_text(told)
    expect(page.locator("#plan-summary")).to_contain_text("2 GPUs.")
    service.move(job_id, JobStatus.QUEUED, JobStatus.RUNNING, "Fine-tuning job started", attempt=1)
    busy_s = {"gpu-0/compute": 5.0, "gpu-0/h2d": 1.0, "gpu-1/compute": 4.0, "gpu-1/h2d": 1.0}
    service.train(
        job_id, 2, 1.9, measured=MEASURED, timeline={**TIMELINE, "busy_s": busy_s, "busiest": "gpu-0/compute"}
    )
    bars = page.locator("#timeline-bars li")
    expect(bars).to_have_count(4)
    expect(bars.nth(2)).to_contain_text("gpu-1 computes")
    fixed = service.submit(windlass={**settings, "gpus": 2})
    page = open_page(f"#/jobs/{fixed}")
    expect(page.locator("#about")).to_contain_text("GPUs2")
