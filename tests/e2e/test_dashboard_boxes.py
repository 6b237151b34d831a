"""The page of boxes in a real browser, on a real API process. The tests write the database as boxes would report."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.live_service import LiveService
from tests.e2e.pages import OpenPage
from tests.support.service.boxes import add_box, make_facts
from windlass.service.machine.fleet.facts import Finding
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Box
from windlass.storage.sql.repositories.boxes import BoxRepository, BoxState
from windlass.storage.sql.repositories.jobs import JobRepository

ATTIC = "#box-list [data-box=attic]"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LiveService]:
    """A service that boxes can join."""
    service = LiveService(tmp_path, cluster_host="10.77.0.1")
    service.start()
    yield service
    service.close()


def call(service: LiveService, box: Box, *, s_ago: float) -> None:
    """Writes that a box called; a call in the future keeps a slow test from finding it away."""
    with service.database.write() as session:
        BoxRepository(session).set(box.id, seen_at=time.time() - s_ago)


def give(service: LiveService, job_id: str, box: Box, reason: str | None = None) -> None:
    with service.database.write() as session:
        job = JobRepository(session).get(job_id)
        job.node, job.waiting_reason = box.node, reason


def bar(card: Locator, name: str) -> Locator:
    return card.locator(".box-bars li").filter(has=card.page.get_by_text(name, exact=True)).locator(".share")


def fits(page: Page, width: int) -> bool:
    return bool(page.evaluate("document.scrollingElement.scrollWidth") <= width)


def test_service_alone_shows_its_head_and_how_a_box_joins(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.submit(suffix="alone")
    page = open_page()
    expect(page.locator("#jobs .job-model")).not_to_contain_text("head")
    page.get_by_role("link", name="Boxes").click()
    card = page.locator("#box-list .box")
    expect(card).to_have_count(1)
    expect(page).to_have_title("Boxes · windlass")
    expect(page.locator("#boxes-alone")).to_be_visible()
    expect(card.locator(".badge")).to_have_text("ready")
    expect(card.locator(".box-drain")).to_be_hidden()
    expect(bar(card, "CPU devices")).to_have_text("0 of 1 used")
    expect(card.locator(".box-jobs")).to_contain_text("Waiting (1)")
    button = page.get_by_role("button", name="Add a box")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#join-commands")).to_contain_text("windlass node join --head 10.77.0.1:8643 --code ")
    expect(page.locator("#join-left")).to_contain_text("It expires in")
    expect(page.locator("#join-title")).to_be_focused()
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#join")).to_be_hidden()
    expect(button).to_be_focused()
    assert page.locator("#join-commands").text_content() == ""
    card.get_by_role("link", name="alone").click()
    expect(page.locator("#detail-id")).to_have_text(job_id)
    expect(page.locator("#boxes")).to_be_hidden()


@pytest.mark.long
def test_service_that_is_closed_to_boxes_says_how_it_is_opened(service: LiveService, open_page: OpenPage) -> None:
    service.kill()
    (service.settings.home / "windlass.toml").write_text("")
    service.start()
    page = open_page("#/boxes")
    page.click("#join-open")
    expect(page.locator("#join-start")).to_contain_text("--cluster-host ADDRESS")
    expect(page.locator("#join-commands")).to_be_hidden()


def test_box_shows_what_it_has_free_and_what_it_works_on_and_follows(service: LiveService, open_page: OpenPage) -> None:
    page = open_page("#/boxes")
    expect(page.locator("#box-list .box")).to_have_count(1)
    page.evaluate("window.wasNeverReloaded = true")
    facts = make_facts(torch="2.0.0", findings=(Finding(text="huge pages: <b>none</b>", is_problem=True),))
    box = add_box(service, "attic", seen_s_ago=-600, facts=facts)
    card = page.locator(ATTIC)
    expect(card).to_be_visible()
    expect(page.locator("#boxes-alone")).to_be_hidden()
    expect(bar(card, "GPUs")).to_have_text("0 of 2 used")
    expect(bar(card, "Memory")).to_have_text("200 GiB of 256 GiB free")
    expect(bar(card, "Space of /mnt/b")).to_have_text("1.0 GiB of 2.0 TiB free")
    expect(bar(card, "Wear of /mnt/a")).to_have_text("27.3 TiB of 546 TiB rated")
    expect(card.locator(".warns")).to_have_text("Wear of /mnt/b491 TiB of 546 TiB rated")
    expect(page.get_by_label("Wear of /mnt/b: used share")).to_have_js_property("value", 0.9)
    expect(card.locator(".box-about")).to_contain_text(
        "10.77.0.2 · 2 × RTX 4090 · 32 cores · link to the head 1.0 GiB/s"
    )
    expect(card.locator(".box-unequal")).to_contain_text("PyTorch: not the head's version")
    expect(card.locator(".box-problems")).to_have_text("huge pages: <b>none</b>")
    running, waiting = service.run(suffix="runs"), service.queue(suffix="waits")
    for job_id, reason in ((running, None), (waiting, "its model is being copied to box attic: 34 %")):
        give(service, job_id, box, reason)
    expect(card.locator(".box-jobs")).to_contain_text("Running (1)")
    expect(card.locator(".box-job-reason")).to_have_text("its model is being copied to box attic: 34 %")
    expect(bar(card, "GPUs")).to_have_text("1 of 2 used")
    expect(page.locator("#boxes-summary")).to_contain_text("2 boxes")
    call(service, box, s_ago=60)
    expect(card.locator(".badge")).to_have_text("away")
    expect(card.locator(".box-reason")).to_contain_text("1 job with states on it waits until it is back.")
    call(service, box, s_ago=-600)
    expect(card.locator(".badge")).to_have_text("ready")
    card.get_by_role("link", name="runs").click()
    expect(page.locator("#about")).to_contain_text("boxattic")
    expect(page.locator(f"[data-job={waiting}] .job-model")).to_contain_text("· attic")
    assert page.evaluate("window.wasNeverReloaded") is True


def test_box_is_drained_resumed_and_removed_after_a_question(service: LiveService, open_page: OpenPage) -> None:
    box = add_box(service, "attic", seen_s_ago=-600)
    running, fresh = service.run(suffix="runs"), service.queue(suffix="fresh")
    for job_id in (running, fresh):
        give(service, job_id, box)
    page = open_page("#/boxes")
    card = page.locator(ATTIC)
    card.get_by_role("button", name="Drain").click()
    expect(card.locator(".badge")).to_have_text("draining")
    expect(card.locator(".box-reason")).to_contain_text("it gets no jobs, and its attempts end at a commit")
    card.get_by_role("button", name="Resume").click()
    expect(card.locator(".badge")).to_have_text("ready")
    card.get_by_role("button", name="Remove").click()
    dialog = page.get_by_role("dialog", name="Remove box attic?")
    expect(dialog.locator("#remove-points")).to_contain_text("1 job that has not begun goes back to the queue.")
    expect(dialog.locator("#remove-points")).to_contain_text("1 job that has begun waits until a person starts each")
    expect(page.get_by_role("button", name="Keep the box")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    with service.database.read() as session:
        assert BoxRepository(session).get(box.id).state == BoxState.READY.value
    card.get_by_role("button", name="Remove").click()
    dialog.get_by_role("button", name="Remove box").click()
    expect(card.locator(".badge")).to_have_text("removed")
    expect(card.locator(".box-reason")).to_contain_text("It holds the states of 1 job")
    expect(card.locator(".box-remove")).to_be_hidden()
    expect(page.locator("#box-list [data-box=head] .box-jobs")).to_contain_text("fresh")
    service.move(running, JobStatus.QUEUED, JobStatus.CANCELLED, "Fine-tuning job cancelled")
    expect(card).to_have_count(0)


@pytest.mark.long
def test_phone_shows_boxes_without_scrolling_sideways(service: LiveService, open_page: OpenPage) -> None:
    add_box(service, "a-box-whose-name-has-no-place-to-break-and-is-long", seen_s_ago=60)
    page = open_page("#/boxes", width=390, height=844)
    expect(page.locator("#box-list .box")).to_have_count(2)
    assert fits(page, 390)
    page.click("#join-open")
    expect(page.locator("#join-commands")).to_contain_text("--code")
    assert fits(page, 390)
