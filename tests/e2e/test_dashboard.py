"""The dashboard in a real browser, on a real API process. The tests write the database as the dispatcher would."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.live_service import LiveService
from tests.e2e.pages import TIMELINE, OpenPage
from windlass.service.installation.local_key import open_client
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.files import FileRepository

SCRIPT = "<script>window.wasInjected = 1</script><img src=x onerror='window.wasInjected = 1'>"


def wait_for_curve(page: Page, train: list[int], valid: list[int] | None = None) -> dict[str, Any]:
    """Waits until the curve has exactly these steps, and returns the drawn points."""
    drawn = "(document.getElementById('chart').data ?? []).map(({x, y}) => ({x: [...x], y: [...y]}))"
    steps = [train] if valid is None else [train, valid]
    page.wait_for_function(f"wanted => JSON.stringify({drawn}.map(t => t.x)) === JSON.stringify(wanted)", arg=steps)
    train_curve: dict[str, Any] = page.evaluate(drawn)[0]
    return train_curve


def test_an_empty_service_says_how_to_begin_and_the_first_job_appears(
    service: LiveService, open_page: OpenPage
) -> None:
    page = open_page()
    expect(page.locator("#connection")).to_have_text("connected")
    expect(page.locator("#empty-cli")).to_have_text("windlass submit MODEL train.jsonl")
    expect(page.locator("#empty-curl")).to_contain_text(f"curl {service.url}/v1/fine_tuning/jobs")
    job_id = service.submit(suffix="first")
    expect(page.locator("#jobs .job")).to_have_count(1)
    expect(page.locator("#empty")).to_be_hidden()
    expect(page.locator("#jobs .badge")).to_have_text("validating files")
    expect(page.locator("#detail-id")).to_have_text(job_id)
    expect(page.locator("#chart-note")).to_have_text("The curve begins with the first step.")


def test_progress_and_the_curve_grow_while_the_page_is_open(service: LiveService, open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#connection")).to_have_text("connected")
    page.evaluate("window.wasNeverReloaded = true")
    job_id = service.queue(suffix="live", validation_file="file-valid")
    item = page.locator("#jobs .job")
    service.wait_because(job_id, "another job holds the GPU")
    expect(item.locator(".job-reason")).to_have_text("Waiting: another job holds the GPU")
    service.move(job_id, JobStatus.QUEUED, JobStatus.RUNNING, "Fine-tuning job started", attempt=1)
    service.tell(job_id, "message", "Loaded 50% of 1,000 parameters")
    expect(page.locator("#detail-reason")).to_have_text("Loaded 50% of 1,000 parameters")
    for step in (1, 2, 3):
        service.train(job_id, step, 3.0 - step / 8)
    service.validate(job_id, 3, 2.75)
    assert wait_for_curve(page, [1, 2, 3], [3])["y"] == [2.875, 2.75, 2.625]
    expect(item.locator(".job-figures")).to_contain_text("3/10\u00a0· loss\u00a02.6250\u00a0· 4,210\u00a0tok/s")
    expect(page.locator("#detail-reason")).to_be_hidden()
    for step in range(4, 11):
        service.train(job_id, step, 3.0 - step / 8)
    wait_for_curve(page, list(range(1, 11)), [3])
    expect(page.locator("#detail-steps")).to_have_text("step 10 of 10")
    expect(page.locator("#figures")).to_contain_text("Validation loss2.7500")
    expect(page.locator("#figures")).to_contain_text("Trained tokens278,310")
    expect(page.locator("#detail-bar")).to_have_js_property("value", 10)
    service.tell(
        job_id,
        "checkpoint",
        "Checkpoint of step 10 written",
        step_number=10,
        fine_tuned_model_checkpoint="ft:tiny:live:1-step-10",
        path="/tmp/x",
        metrics={"step": 10, "train_loss": 1.75},
    )
    expect(page.locator("#checkpoints")).to_contain_text("step 10 · loss 1.7500")
    done = {"fine_tuned_model": "ft:tiny:live:1", "result_files": ["file-results"]}
    service.move(job_id, JobStatus.RUNNING, JobStatus.SUCCEEDED, "The job has successfully completed", **done)
    expect(page.locator("#detail-status")).to_have_text("succeeded")
    expect(page.locator("#detail-result-model")).to_have_text("ft:tiny:live:1")
    expect(page.locator("#detail-result-files a")).to_have_attribute("href", "/v1/files/file-results/content")
    expect(page.locator("#cancel")).to_be_hidden()
    assert page.evaluate("window.wasNeverReloaded") is True


@pytest.mark.long
def test_dashboard_ssd_wear_appears_after_first_step_and_follows_step_time(
    service: LiveService, open_page: OpenPage
) -> None:
    service.kill()
    (service.settings.home / "windlass.toml").write_text("ssd_endurance_tbw = 600\n")
    service.start()
    job_id = service.run(total_steps=20)
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#detail-reason")).to_have_text("Starting")
    expect(page.locator("#detail-wear")).to_be_hidden()
    # The first step takes longer than the later ones.
    service.train(job_id, 1, 2.0, total_steps=20, step_s=60.0)
    figures = (
        "SSD wear: 19.23 GiB a step, 384.64 GiB by the whole job (0.034 % of the rating); "
        "the rating lasts 58 k steps or"
    )
    expect(page.locator("#detail-wear")).to_have_text(f"{figures} 40 days of training")
    for step in range(2, 9):
        service.train(job_id, step, 2.0, total_steps=20, step_s=120.0 / step)
    expect(page.locator("#detail-wear")).to_have_text(f"{figures} 10 days of training")
    service.move(job_id, JobStatus.RUNNING, JobStatus.CANCELLED, "Fine-tuning job cancelled")
    written = "19.23 GiB a step, 153.85 GiB by this job (0.014 % of the rating)"
    expect(page.locator("#detail-wear")).to_contain_text(written)
    expect(page.locator("#figures")).to_contain_text("Written to SSD154 GiB")


def test_dashboard_step_with_timeline_shows_share_of_each_resource(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.run()
    page = open_page(f"#/jobs/{job_id}")
    service.train(job_id, 1, 2.0)
    expect(page.locator("#figures")).to_contain_text("2.0000")
    expect(page.locator("#timeline-panel")).to_be_hidden()
    service.train(job_id, 2, 1.9, timeline=TIMELINE)
    bars = page.locator("#timeline-bars li")
    expect(bars).to_have_text(
        ["gpu-0 computes90 %", "gpu-0 copies out10 %", "gpu-0 copies in20 %", "optimizer-095 %", "ssd-050 %"]
    )
    assert [bar.get_attribute("class") for bar in bars.all()].count("busiest") == 1
    expect(page.locator("#timeline-bars .busiest")).to_contain_text("optimizer-0")
    expect(page.get_by_label("ssd-0: busy share of the step")).to_have_js_property("value", 0.5)
    expect(page.locator("#timeline-summary")).to_have_text(
        "The step took 6.6 s; its longest chain of work that must be serial takes 4.4 s."
    )
    expect(page.locator("#timeline-waits")).to_have_text("The device waited for: the block's update 8 %, a commit 2 %.")
    expect(page.locator("#timeline-trace")).to_have_attribute("href", f"/v1/fine_tuning/jobs/{job_id}/timeline")


@pytest.mark.long
def test_a_job_of_one_step_without_a_gpu_is_told_of_in_fitting_words(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.run(total_steps=1)
    busy = {"gpu-0/compute": 5.94, "gpu-0/d2h": 0.0, "ssd-0": 3.3}
    service.train(job_id, 1, 2.0, total_steps=1, timeline=TIMELINE | {"busy_s": busy, "busiest": "gpu-0/compute"})
    service.move(job_id, JobStatus.RUNNING, JobStatus.SUCCEEDED, "Done", fine_tuned_model="ft:tiny::1")
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#timeline-bars li")).to_have_text(["CPU computes90 %", "CPU copies out0 %", "ssd-050 %"])
    expect(page.locator("#jobs .job-figures")).to_contain_text("1\u00a0step\u00a0· loss")
    cancelled = service.queue(total_steps=270)
    service.move(cancelled, JobStatus.QUEUED, JobStatus.CANCELLED, "Cancelled")
    expect(page.locator(f"[data-job={cancelled}] .job-figures")).to_contain_text("0/270")


@pytest.mark.long
def test_a_page_that_was_cut_off_shows_every_point_once(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.run(total_steps=12)
    other = service.run(suffix="other")
    for step in (1, 2, 3):
        service.train(job_id, step, 4.0 - step / 4, total_steps=12)
    page = open_page(f"#/jobs/{job_id}")
    wait_for_curve(page, [1, 2, 3])
    service.train(job_id, 4, 3.0, total_steps=12)
    wait_for_curve(page, [1, 2, 3, 4])
    page.evaluate("window.wasNeverReloaded = true")
    snapshots = []
    page.on("request", lambda request: snapshots.append(request.url) if "/metrics" in request.url else None)
    service.kill()
    expect(page.locator("#connection")).to_have_text("reconnecting")
    expect(page.locator("#away")).to_be_visible()
    # Meanwhile one more step ends; then the runner is lost, and a second attempt resumes from the commit of step 3.
    service.train(job_id, 5, 9.0, total_steps=12)
    service.move(job_id, JobStatus.RUNNING, JobStatus.QUEUED, "The runner was lost", attempt=1)
    service.move(job_id, JobStatus.QUEUED, JobStatus.RUNNING, "Started again", attempt=2)
    service.train(job_id, 4, 2.0, total_steps=12, attempt=2)
    service.train(other, 7, 1.5)
    service.start()
    expect(page.locator("#connection")).to_have_text("connected")
    expect(page.locator("#away")).to_be_hidden()
    page.wait_for_function("() => document.getElementById('chart').data[0].y[3] === 2")
    assert wait_for_curve(page, [1, 2, 3, 4])["y"] == [3.75, 3.5, 3.25, 2.0]
    assert snapshots == []  # all came by the event stream
    expect(page.locator(f"[data-job={other}] .job-figures")).to_contain_text("7/10")
    messages = page.locator("#log li").filter(has_text=re.compile("The runner was lost|Started again"))
    expect(messages).to_have_count(2)
    service.train(job_id, 5, 2.25, total_steps=12, attempt=2)
    wait_for_curve(page, [1, 2, 3, 4, 5])
    assert page.evaluate("window.wasNeverReloaded") is True
    page.reload()
    assert wait_for_curve(page, [1, 2, 3, 4, 5])["y"] == [3.75, 3.5, 3.25, 2.0, 2.25]
    expect(page.locator("#detail-id")).to_have_text(job_id)


def test_an_event_that_the_first_answer_contains_counts_once(open_page: OpenPage) -> None:
    """The stream may be behind the metrics that were read, and then repeats values that were replaced since."""
    page = open_page()
    points = page.evaluate(
        """async () => {
            const { Curve } = await import("/static/charts/curve.js");
            const data = { step: [1, 2], attempt: [1, 2], train_loss: [3, 2], valid_loss: [null, null] };
            const curve = new Curve({ data, last_event_ordinal: 20 });
            const event = (attempt, step, train_loss) => ({ type: "metrics", attempt, data: { step, train_loss } });
            const applied = [
                curve.apply(event(1, 2, 9), 18),
                curve.apply(event(1, 3, 9), 19),
                curve.apply(event(2, 2, 2), 20),
                curve.apply(event(2, 3, 1), 21),
            ];
            return [applied, curve.train];
        }"""
    )
    assert points == [[False, False, False, True], {"x": [1, 2, 3], "y": [3, 2, 1]}]


@pytest.mark.long
def test_a_page_that_outlives_its_service_being_replaced_starts_over(service: LiveService, open_page: OpenPage) -> None:
    old = service.run(suffix="old")
    page = open_page(expected="404")
    expect(page.locator("#detail-id")).to_have_text(old)
    service.train(old, 1, 2.0)
    wait_for_curve(page, [1])
    service.kill()
    service.forget_everything()
    new = service.submit(suffix="new")
    service.start()
    expect(page.locator("#jobs .job-name")).to_have_text(["new"])
    expect(page.locator("#detail-none")).to_have_text(f"there is no fine-tuning job '{old}'")
    page.click("#jobs .job")
    expect(page.locator("#detail-id")).to_have_text(new)


def test_dashboard_user_text_with_html_is_shown_as_text(service: LiveService, open_page: OpenPage) -> None:
    with service.database.write() as session:
        FileRepository(session).add(file_id="file-x", filename=f"{SCRIPT}.jsonl", purpose="fine-tune", nbytes=1)
    job_id = service.run(suffix=SCRIPT, model=f"model {SCRIPT}", training_file="file-x", metadata={SCRIPT: SCRIPT})
    service.train(job_id, 1, 2.0)
    service.tell(job_id, "message", SCRIPT, level="warn")
    service.tell(
        job_id,
        "checkpoint",
        SCRIPT,
        step_number=1,
        fine_tuned_model_checkpoint=SCRIPT,
        path="/tmp/x",
        metrics={"train_loss": 2.0},
    )
    error = {"code": SCRIPT, "message": SCRIPT, "param": None}
    page = open_page(f"#/jobs/{job_id}")
    for place in ("#jobs .job-name", "#jobs .job-model", "#detail-name", "#about", "#log", "#checkpoints"):
        expect(page.locator(place)).to_contain_text(SCRIPT)
    expect(page.locator("#about")).to_contain_text(f"{SCRIPT}.jsonl\nfile-x")
    expect(page.locator("#about")).to_contain_text("on disks0 B")
    page.click("#cancel")
    expect(page.locator("#cancel-text")).to_contain_text(SCRIPT)
    page.click("text=Keep it")
    service.move(job_id, JobStatus.RUNNING, JobStatus.FAILED, SCRIPT, error=error)
    expect(page.locator("#detail-error-message")).to_have_text(SCRIPT)
    expect(page.locator("#jobs .job-reason")).to_have_text(SCRIPT)
    assert page.evaluate("window.wasInjected") is None
    assert page.locator("body script, body img[src=x]").count() == 0


def test_a_job_is_cancelled_after_a_question(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.queue()
    page = open_page(f"#/jobs/{job_id}")
    page.click("#cancel")
    page.click("text=Keep it")
    expect(page.locator("#cancel-dialog")).to_be_hidden()
    assert service.job(job_id).status is JobStatus.QUEUED
    page.click("#cancel")
    page.click("#cancel-confirm")
    expect(page.locator("#detail-status")).to_have_text("cancelled")
    expect(page.locator("#cancel")).to_be_hidden()
    assert service.job(job_id).status is JobStatus.CANCELLED

    running = service.run(suffix="running")
    page.click(f"[data-job={running}]")
    page.click("#cancel")
    page.click("#cancel-confirm")
    expect(page.locator("#cancel")).to_have_text("Cancelling…")
    expect(page.locator("#cancel")).to_be_disabled()
    assert service.job(running).cancel_requested


def test_a_job_is_paused_and_resumed(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.submit()
    page = open_page(f"#/jobs/{job_id}")
    page.click("#pause")
    expect(page.locator("#detail-status")).to_have_text("paused")
    expect(page.locator("#detail-reason")).to_have_text("Paused: it holds no GPU and no memory")
    expect(page.locator("#pause")).to_have_text("Resume")
    page.click("#pause")
    expect(page.locator("#pause")).to_have_text("Pause")
    assert service.job(job_id).status is JobStatus.VALIDATING_FILES

    running = service.run(suffix="running")
    page.click(f"[data-job={running}]")
    page.click("#pause")
    expect(page.locator("#pause")).to_have_text("Pausing…")
    expect(page.locator("#pause")).to_be_disabled()
    service.move(running, JobStatus.PAUSING, JobStatus.CANCELLED, "Fine-tuning job cancelled")
    expect(page.locator("#pause")).to_be_hidden()


@pytest.mark.long
def test_dashboard_failed_job_shows_its_error(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.submit()
    message = "train.jsonl, line 3: messages is missing"
    error = {"code": "invalid_file", "message": message, "param": "training_file"}
    service.move(job_id, JobStatus.VALIDATING_FILES, JobStatus.FAILED, f"The job failed: {message}", error=error)
    page = open_page(f"#/jobs/{job_id}")
    expect(page.locator("#detail-error-message")).to_have_text(message)
    expect(page.locator("#chart-note")).to_have_text("This job made no step.")


@pytest.mark.long
def test_a_diverged_step_leaves_a_gap(service: LiveService, open_page: OpenPage) -> None:
    job_id = service.run()
    page = open_page(f"#/jobs/{job_id}")
    for step, loss in ((1, 2.0), (2, None), (3, 1.5)):
        service.train(job_id, step, 0.0, train_loss=loss)
    assert wait_for_curve(page, [1, 2, 3])["y"] == [2.0, None, 1.5]


def test_a_phone_shows_the_list_or_a_job_and_keys_suffice(service: LiveService, open_page: OpenPage) -> None:
    names = ["a-suffix-of-sixty-four-characters-that-has-no-place-to-break-at-all", "short"]
    first, _ = [service.run(suffix=name, metadata={"k" * 64: "v" * 512}) for name in names]
    service.train(first, 1, 2.0)
    page = open_page(width=390, height=844)
    expect(page.locator("#jobs .job")).to_have_count(2)
    expect(page.locator("#detail")).to_be_hidden()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    page.locator(f"[data-job={first}]").focus()
    page.keyboard.press("Enter")
    wait_for_curve(page, [1])
    expect(page.locator(".jobs")).to_be_hidden()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert page.evaluate("document.querySelector('#chart .main-svg').clientWidth") <= 390
    expect(page.get_by_role("progressbar", name="Training progress")).to_be_visible()
    page.locator("#cancel").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Cancel this job?")).to_be_visible()
    expect(page.get_by_role("button", name="Keep it")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#cancel-dialog")).to_be_hidden()
    page.get_by_role("link", name="All jobs").click()
    expect(page.locator("#jobs .job")).to_have_count(2)


@pytest.mark.long
def test_older_jobs_come_on_request(service: LiveService, open_page: OpenPage) -> None:
    ids = [service.submit(suffix=f"job-{number}") for number in range(53)]
    page = open_page()
    expect(page.locator("#jobs .job")).to_have_count(50)
    page.click("#older")
    expect(page.locator("#jobs .job")).to_have_count(53)
    shown = page.eval_on_selector_all("#jobs .job", "jobs => jobs.map(job => job.dataset.job)")
    assert shown == ids[::-1]
    expect(page.locator("#older")).to_be_hidden()


def test_a_job_that_was_deleted_leaves_the_open_page(service: LiveService, open_page: OpenPage) -> None:
    kept, chosen, other = (service.run(suffix=name) for name in ("kept", "chosen", "other"))
    for job_id in (chosen, other):
        service.move(job_id, JobStatus.RUNNING, JobStatus.CANCELLED, "Fine-tuning job cancelled")
    page = open_page(f"#/jobs/{chosen}", expected="404")
    expect(page.locator("#detail-id")).to_have_text(chosen)
    expect(page.locator("#jobs .job")).to_have_count(3)
    with open_client(service.settings) as client:
        client.delete_job(chosen, with_model=False)
        client.delete_job(other, with_model=False)
    expect(page.locator("#jobs .job-name")).to_have_text(["kept"])
    expect(page.locator("#detail-none")).to_have_text(f"there is no fine-tuning job '{chosen}'")
    page.click("#jobs .job")
    expect(page.locator("#detail-id")).to_have_text(kept)


@pytest.mark.long
def test_a_job_that_does_not_exist_is_named(open_page: OpenPage) -> None:
    page = open_page("#/jobs/ftjob-none", expected="404")
    expect(page.locator("#detail-none")).to_have_text("there is no fine-tuning job 'ftjob-none'")
