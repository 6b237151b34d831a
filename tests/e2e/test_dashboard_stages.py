"""A job over several boxes on the dashboard: how each box used a step, and who waited for whom."""

import dataclasses

import pytest
from playwright.sync_api import expect

from tests.e2e.live_service import LiveService
from tests.e2e.pages import OpenPage
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.recorder import link_resource
from windlass.actors.timeline.span_files import FOLDER, SIMULATED_FOLDER, StepSpans, keep_step
from windlass.actors.timeline.summary import Timeline
from windlass.service.jobs.spec_builder import job_dir
from windlass.storage.sql.repositories.jobs import JobRepository

HERE, THERE = "gpu-0/compute", "b1/gpu-0/compute"


def span(
    resource: str, kind: SpanKind, start_s: float, end_s: float, *, block: int = 0, nbytes: int = 0, box: int = -1
) -> WorkSpan:
    return WorkSpan(resource, kind, 2, block, -1, start_s, end_s, nbytes, box)


def step_of_two_boxes() -> StepSpans:
    """A step of 10 s. The second box has the head, and is slower."""
    there, back = link_resource(0, 1), link_resource(1, 0)
    timeline = Timeline(2, keeps_grads=True, overlaps_steps=True, boxes=("head", "attic"))
    timeline.begin(100.0)
    timeline.add(
        [
            span(HERE, SpanKind.FORWARD, 100.0, 101.0),
            span(HERE, SpanKind.FORWARD, 101.0, 102.0),
            span(HERE, SpanKind.WAIT_BOX, 102.0, 105.0, box=1),
            span(HERE, SpanKind.BACKWARD, 105.0, 106.0),
            span(HERE, SpanKind.WAIT_BOX, 106.0, 109.0, box=1),
            span(HERE, SpanKind.BACKWARD, 109.0, 110.0),
            span("ssd-0", SpanKind.READ_PARAMS, 100.0, 101.0, nbytes=5),
            span(THERE, SpanKind.WAIT_BOX, 100.0, 101.0, box=0),
            span(THERE, SpanKind.HEAD, 101.0, 105.0, block=1),
            span(THERE, SpanKind.HEAD, 105.0, 109.0, block=1),
            span("b1/ssd-0", SpanKind.READ_STATES, 102.0, 103.0, nbytes=5),
            span(there, SpanKind.PULL_HIDDEN, 100.5, 101.0, nbytes=10**9, box=0),
            span(there, SpanKind.PULL_HIDDEN, 101.5, 102.0, nbytes=10**9, box=0),
            span(back, SpanKind.PULL_GRADS, 104.5, 105.0, nbytes=10**9, box=1),
        ]
    )
    step = timeline.end_step(2)
    assert step is not None
    return step


def run_over_boxes(service: LiveService) -> str:
    """A running job that has reported such a step."""
    job_id, step = service.run(), step_of_two_boxes()
    folder = job_dir(service.settings, job_id) / FOLDER
    folder.mkdir(parents=True)
    keep_step(folder, step)
    service.train(job_id, 2, 1.9, timeline=step.summary)
    return job_id


def test_job_over_boxes_shows_each_box_the_links_and_who_waits(service: LiveService, open_page: OpenPage) -> None:
    job_id = run_over_boxes(service)
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#timeline-bars li")).to_have_text(
        [
            "head",
            "CPU computes40 %",
            "ssd-010 %",
            "attic",
            "CPU computes80 %",
            "ssd-010 %",
            "between boxes",
            "link attic to head5 %",
            "link head to attic10 %",
        ]
    )
    expect(page.get_by_label("attic: CPU computes: busy share of the step")).to_have_js_property("value", 0.8)
    expect(page.locator("#timeline-bars .busiest")).to_have_text("CPU computes80 %")
    expect(page.locator("#timeline-waits")).to_be_hidden()
    expect(page.locator("#timeline-boxes")).to_have_text(
        "head waits 60 % of a step for attic; attic waits 10 % of a step for head; "
        "link head to attic 10 % busy, 2 GB/s."
    )
    expect(page.locator("#timeline-each-box li")).to_have_text(
        [
            "head computed 40 % of the step, and waited for: attic 60 %.",
            "attic computed 80 % of the step, and waited for: head 10 %, between operations 10 %.",
        ]
    )
    page.click("#lanes summary")
    expect(page.locator("#lanes .box-title")).to_have_text(["head", "attic", "between boxes"])
    expect(page.locator("#lanes .lane")).to_have_text(
        [
            "CPU computesmeasuredwaits for another boxforwardbackward",
            "ssd-0measuredparams",
            "CPU computesmeasuredwaits for another boxbackward",
            "ssd-0measuredstates",
            "link attic to headmeasuredgradients",
            "link head to atticmeasuredactivations",
        ]
    )
    # Both boxes compute at once: from 5 to 6 s, one above the other.
    computes = {
        box: page.get_by_label(f"{box}: CPU computes, measured").locator("path.backward") for box in ("head", "attic")
    }
    expect(computes["head"]).to_have_attribute("d", "M500 0H600V1H500ZM900 0H1000V1H900Z")
    expect(computes["attic"]).to_have_attribute("d", "M100 0H900V1H100Z")
    # Another job, on one box, has none of it.
    other = service.run(suffix="other")
    service.train(
        other,
        2,
        1.9,
        timeline={"period_s": 2.0, "busy_s": {HERE: 1.0}, "stall_s": {}, "busiest": HERE, "dependency_bound_s": None},
    )
    page.click(f"[data-job={other}]")
    expect(page.locator("#timeline-bars li")).to_have_text(["CPU computes50 %"])
    expect(page.locator("#timeline-boxes")).to_be_hidden()
    expect(page.locator("#timeline-each-box li")).to_have_count(0)


def test_bars_of_each_box_stand_beside_those_of_its_plan(service: LiveService, open_page: OpenPage) -> None:
    job_id = run_over_boxes(service)
    with service.database.write() as session:
        job = JobRepository(session).get(job_id)
        JobRepository(session).set_fields(job_id, windlass={**job.windlass, "boxes": ["head", "attic", "cellar"]})
    planned = step_of_two_boxes()
    there = {"head/gpu-0/compute": 6.0, "cellar/gpu-0/compute": 3.0}
    boxes = [{**box, "box": name} for box, name in zip(planned.summary["boxes"], ("head", "cellar"), strict=True)]
    summary = {**planned.summary, "busy_s": there, "boxes": boxes, "period_s": 8.0}
    folder = job_dir(service.settings, job_id) / "prepare" / SIMULATED_FOLDER
    folder.mkdir(parents=True)
    keep_step(folder, dataclasses.replace(planned, summary=summary))
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#timeline-bars li")).to_have_text(
        [
            "head",
            "CPU computes40 % · 75 %",
            "ssd-010 % · 0 %",
            "attic",
            "CPU computes80 % · 0 %",
            "ssd-010 % · 0 %",
            "cellar",
            "CPU computes0 % · 38 %",
            "between boxes",
            "link attic to head5 % · 0 %",
            "link head to attic10 % · 0 %",
        ]
    )
    expect(page.get_by_label("head: CPU computes: planned share of the step")).to_have_js_property("value", 0.75)
    expect(page.locator("#timeline-summary")).to_contain_text("Simulated, it takes 8 s.")
    expect(page.locator("#plan-panel")).to_be_hidden()


@pytest.mark.long
def test_waiting_job_shows_its_planned_step_once_it_is_divided(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.queue()
    with service.database.write() as session:
        job = JobRepository(session).get(job_id)
        JobRepository(session).set_fields(job_id, windlass={**job.windlass, "boxes": ["head", "attic"]})
    service.wait_because(job_id, "its plan over the boxes head, attic is being made")
    page = open_page(expected="404")
    with page.expect_response(f"**/{job_id}/plan"):
        page.click(f"[data-job={job_id}]")
    expect(page.locator("#detail-reason")).to_contain_text("is being made")
    expect(page.locator("#timeline-bars li")).to_have_count(0)
    folder = job_dir(service.settings, job_id) / "prepare" / SIMULATED_FOLDER
    folder.mkdir(parents=True)
    keep_step(folder, step_of_two_boxes())
    service.wait_because(job_id, "its files are to be copied to box attic")
    expect(page.locator("#timeline-summary")).to_contain_text("10 s")


def test_timeline_of_a_job_over_boxes_fits_a_phone(service: LiveService, open_page: OpenPage) -> None:
    job_id = run_over_boxes(service)
    page = open_page(f"#/jobs/{job_id}", width=390, height=844)
    page.click("#lanes summary")
    expect(page.locator("#lanes .lane")).to_have_count(6)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
