"""The page that tries a job before it exists."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from transformers import LlamaConfig

from tests.e2e.live_service import LiveService
from tests.e2e.pages import OpenPage
from tests.e2e.test_dashboard_plan import PLAN
from tests.support.service.api_client import make_model
from windlass.planner.hardware.named_machines import machine_of

PLANS = "**/v1/fine_tuning/plans"
REFUSED = "status of 400"  # in a message of the browser
LENGTHS = {"limit": 2048, "widest": 2048, "mean": 2048, "of_data": False}
# Answers of the service come when the test sends them. `asked` has the questions, and the body counts them.
STUB = """() => {
    window.asked = [];
    const original = window.fetch;
    window.fetch = (url, options) => {
        if (options?.method !== "POST" || url !== "/v1/fine_tuning/plans") return original(url, options);
        const question = { body: JSON.parse(options.body), isAborted: false };
        document.body.dataset.asked = window.asked.push(question);
        const body = new ReadableStream({
            start(controller) {
                const encoder = new TextEncoder();
                question.send = (text) => controller.enqueue(encoder.encode(text));
                question.end = () => controller.close();
                options.signal.addEventListener("abort", () => {
                    question.isAborted = true;
                    controller.error(options.signal.reason);
                });
            },
        });
        const headers = { "content-type": "text/event-stream; charset=utf-8" };
        return Promise.resolve(new Response(body, { headers }));
    };
}"""


def plan_of(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An answer to a question: a step takes as many seconds as the batch has examples."""
    batch = body["batch_size"]
    return {
        "object": "fine_tuning.plan",
        **PLAN,
        "model": body["model"],
        "hardware": body.get("hardware") or machine_of("rtx4090").model_dump(),
        "step_s": float(batch),
        "step_s_low": batch * 0.8,
        "step_s_high": batch * 1.25,
        "tokens_per_s": 2048.0,
        "times_from": "rates",
        "num_compared": 0,
        "ssd_write_gb_per_step": 1250.0,
        "least_gpu_gib": 3.5,
        "least_gpu_reason": "the logits of the head 1.62 GiB",
        "example_tokens": LENGTHS,
        "what_if": None,
        "warnings": [],
        "job_settings": {"batch_size": batch, "num_microbatches": 4, "sequence_length": 2048, **body["windlass"]},
        **changes,
    }


def answer(route: Route, bodies: list[dict[str, Any]]) -> None:
    """Answers as the service does: without clipping a step is twice as fast, and 7 is no good batch."""
    body = json.loads(route.request.post_data or "")
    bodies.append(body)
    if body["batch_size"] == 7:
        error = {"message": "batch_size: 7 is not liked", "param": "batch_size", "code": "invalid_value"}
        route.fulfill(status=400, json={"error": error})
        return
    changes: dict[str, Any] = {}
    if "clip_norm" in body["windlass"]:
        changes["step_s"] = body["batch_size"] / 2
        changes["tokens_per_s"] = 4096.0
    if body.get("what_if"):
        rows = [{"key": "ram", "change": "64 GiB more RAM", "feasible": True, "step_s": 8.0, "tokens_per_s": 4096.0}]
        changes["what_if"] = [{**rows[0], "gain": 1.0}]
    route.fulfill(json=plan_of(body, **changes))


def event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


@pytest.fixture
def open_plan(service: LiveService, open_page: OpenPage) -> OpenPage:
    make_model(service.settings.models_dir / "org" / "small")

    def open_plan(fragment: str = "", **options: Any) -> Page:
        page = open_page(fragment, **options)
        expect(page.locator("#connection")).to_have_text("connected")
        return page

    return open_plan


def test_each_change_of_a_setting_is_planned_and_compared(open_plan: OpenPage) -> None:
    page = open_plan(expected=REFUSED)
    bodies: list[dict[str, Any]] = []
    page.route(PLANS, lambda route: answer(route, bodies))
    page.click("#to-plan")
    headline, delta = page.locator("#try-headline"), page.locator("#try-delta")
    expect(headline).to_have_text("It fits: 16 s a step")
    expect(delta).to_be_hidden()
    expect(page.locator("#try-figures dd")).to_have_text(["16 s", "12.8 to 20 s", "2,048", "1.25 TB", "4"])
    expect(page.locator("#try-bound")).to_have_text(PLAN["reasons"][0])
    sure = "The range is likely: it follows from the machine's rates, and no job of this machine was compared."
    expect(page.locator("#try-sure")).to_have_text(sure)
    expect(page.locator("#try-least-gib")).to_have_text(
        "The least GPU memory for this job is 3.5 GiB, with all else as it is"
    )
    expect(page.locator("#try-memory li")).to_have_text(
        ["GPU10.8 GiB of 24.0 GiB", "RAM21.5 GiB of 60.0 GiB", "SSDs48.0 GiB of 1.8 TiB"]
    )
    expect(page.locator("#try-busy .busiest")).to_contain_text("the CPU updates")

    page.get_by_label("Clip gradients").select_option("off")
    expect(delta).to_have_text("2x faster than before (clip gradients on → off)")
    assert bodies[-1]["windlass"] == {"clip_norm": None}
    page.get_by_label("Machine", exact=True).select_option("rtx5090")
    expect(delta).to_have_text("As fast as before (machine rtx3090 → rtx5090)")
    page.get_by_label("RAM (GiB)").select_option("128")
    expect(delta).to_have_text("As fast as before (RAM 64 → 128)")
    assert bodies[-1]["hardware"] == machine_of("rtx5090:ram=128").model_dump()
    page.click("#try-use summary")
    expect(page.locator("#try-command")).to_have_text(
        "windlass plan --model org/small --batch-size 16 --seq-len 2048 --hardware rtx5090:ram=128 --no-clip"
    )
    expect(page.locator("#try-settings")).to_contain_text('"clip_norm": null')

    batch = page.get_by_label("Batch size")
    batch.fill("7")
    expect(page.locator("#try-batch_size-error")).to_have_text("7 is not liked")
    expect(batch).to_have_attribute("aria-invalid", "true")
    batch.fill("32")
    expect(page.locator("#try-batch_size-error")).to_be_hidden()
    expect(delta).to_have_text("As many tokens a second as before (batch size 16 → 32)")
    page.click("#try-what-if")
    expect(page.locator("#try-what-if-rows tr")).to_have_text("64 GiB more RAM8 s4,096+100 %")

    address = page.url
    page.reload()
    expect(headline).to_have_text("It fits: 16 s a step")
    expect(batch).to_have_value("32")
    expect(page.get_by_label("RAM (GiB)")).to_have_value("128")
    assert page.url == address


def test_an_estimate_stands_until_the_plan_comes_and_old_answers_are_dropped(open_plan: OpenPage) -> None:
    page = open_plan(width=390, height=844)
    page.evaluate(STUB)
    page.click("#to-plan")
    expect(page.locator("body")).to_have_attribute("data-asked", "1")
    question = page.evaluate("window.asked[0].body")
    assert question["stream"] is True
    headline, answer = page.locator("#try-headline"), page.locator("#try-answer")

    def send(index: int, text: str) -> None:
        page.evaluate("([index, text]) => window.asked[index].send(text)", [index, text])

    estimate = event("fine_tuning.plan.estimate", plan_of(question, step_s=15.0, estimated=True, choices=None))
    send(0, estimate[:40])
    send(0, estimate[40:-1])  # an event ends with its empty line
    expect(headline).to_have_text("Planning…")
    send(0, estimate[-1])
    expect(headline).to_have_text("It fits: at least 15 s a step, being simulated…")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(page.locator("#try-figures dd").first).to_have_text("≥ 15 s")

    page.get_by_label("Batch size").fill("8")
    expect(page.locator("body")).to_have_attribute("data-asked", "2")
    assert page.evaluate("window.asked.map((question) => question.isAborted)") == [True, False]
    send(1, event("fine_tuning.plan.without_advice", plan_of(page.evaluate("window.asked[1].body"))))
    expect(headline).to_have_text("It fits: 8 s a step")
    expect(answer).to_have_attribute("aria-busy", "true")
    send(1, event("fine_tuning.plan", plan_of(page.evaluate("window.asked[1].body"))))
    expect(answer).to_have_attribute("aria-busy", "false")
    # The phone shows the answer above the form, and nothing is wider than the screen.
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    page.get_by_label("SSDs", exact=True).scroll_into_view_if_needed()
    expect(headline).to_be_in_viewport()

    page.get_by_label("Batch size").fill("10")
    expect(page.locator("body")).to_have_attribute("data-asked", "3")
    by_rates = plan_of(question, step_s=15.0, estimated=True, to_be_measured=True, choices=None)
    send(2, event("fine_tuning.plan.estimate", by_rates))
    expect(headline).to_have_text("It fits: about 15 s a step by this machine's rates, being measured…")
    expect(page.locator("#try-figures dd").first).to_have_text("≈ 15 s")
    measuring = {"message": "measuring the model's blocks with 4 examples of 512 tokens", "done": 1, "total": 3}
    send(2, event("fine_tuning.plan.progress", measuring))
    told = "Measuring the model's blocks with 4 examples of 512 tokens (2 of 3)…"
    expect(page.locator("#try-measuring")).to_have_text(told)
    send(2, event("fine_tuning.plan", plan_of(question)))
    expect(page.locator("#try-unmeasured")).to_be_hidden()

    # A look measures nothing: the user decides.
    page.get_by_label("Batch size").fill("12")
    expect(page.locator("body")).to_have_attribute("data-asked", "4")
    question = page.evaluate("window.asked[3].body")
    assert question["measure"] is False
    send(3, event("fine_tuning.plan", plan_of(question, measuring_s=44.0)))
    expect(headline).to_have_text("It fits: about 12 s a step by this machine's rates")
    expect(page.locator("#try-measuring")).to_contain_text("Measuring takes about 44 s on all cores")
    page.get_by_role("button", name="Measure this machine").click()
    expect(page.locator("body")).to_have_attribute("data-asked", "5")
    assert page.evaluate("window.asked[4].body") == {**question, "measure": True}
    send(4, event("fine_tuning.plan.progress", measuring))
    expect(page.locator("#try-measuring")).to_have_text(told)
    expect(page.locator("#try-measure")).to_be_hidden()
    send(4, event("fine_tuning.plan", plan_of(question, step_s=14.0, times_from="blocks")))
    expect(headline).to_have_text("It fits: 14 s a step")
    expect(page.locator("#try-unmeasured")).to_be_hidden()

    page.click("#try-what-if")
    expect(page.locator("body")).to_have_attribute("data-asked", "6")
    row = {"key": "ram", "change": "64 GiB more RAM", "feasible": True, "step_s": 8.0, "tokens_per_s": 1.0, "gain": 1.0}
    changes = plan_of(question, step_s=14.0, what_if=[row], num_changes_left=2)
    send(5, event("fine_tuning.plan.changes", changes))
    expect(page.locator("#try-what-if-rows tr")).to_have_text("64 GiB more RAM8 s1.0+100 %")
    expect(page.locator("#try-what-if-note")).to_have_text("Planning 2 more changes…")
    expect(headline).to_have_text("It fits: 14 s a step")
    send(5, event("fine_tuning.plan", plan_of(question, step_s=14.0, what_if=[row])))
    expect(page.locator("#try-what-if-note")).to_have_text("The largest gain comes first.")

    page.get_by_label("Batch size").fill("9")
    expect(page.locator("body")).to_have_attribute("data-asked", "7")
    error = {"message": "the plan was not made", "param": None, "code": "no_memory"}
    send(6, event("error", {"error": error}))
    expect(page.locator("#try-problem")).to_have_text("the plan was not made")
    expect(headline).to_have_text("There is no plan")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("body")).to_have_attribute("data-asked", "8")
    send(7, event("fine_tuning.plan", plan_of(page.evaluate("window.asked[7].body"))))
    expect(headline).to_have_text("It fits: 9 s a step")
    expect(page.locator("#try-retry")).to_be_hidden()


def test_page_can_be_loaded_again_and_tells_of_which_plan_old_numbers_are(open_plan: OpenPage) -> None:
    page = open_plan(expected="status of (400|503)")
    bodies: list[dict[str, Any]] = []
    page.route(PLANS, lambda route: answer(route, bodies))
    shapes, again = "**/v1/fine_tuning/shapes", page.get_by_role("button", name="Try again")
    page.route(shapes, lambda route: route.fulfill(status=503, json={"error": {"message": "the service starts"}}))
    page.click("#to-plan")
    expect(page.locator("#try-problem")).to_have_text("the service starts")
    expect(page.locator("#try-columns")).to_be_hidden()
    page.unroute(shapes)
    again.click()
    expect(page.locator("#try-problem")).to_be_hidden()
    expect(again).to_be_hidden()
    headline, old = page.locator("#try-headline"), page.locator("#try-old")
    expect(headline).to_have_text("It fits: 16 s a step")
    expect(old).to_be_hidden()
    page.get_by_label("Batch size").fill("7")
    expect(page.locator("#try-batch_size-error")).to_have_text("7 is not liked")
    expect(old).to_have_text("The numbers below are of the last plan, before: batch size 16 → 7.")
    expect(page.locator("#try-figures dd").first).to_have_text("16 s")
    page.reload()  # nothing was planned before this error
    expect(page.locator("#try-batch_size-error")).to_have_text("7 is not liked")
    expect(old).to_be_hidden()
    for part in ("#try-figures", "#try-memory-panel", "#try-details", "#try-what-if-panel", "#try-use"):
        expect(page.locator(part)).to_be_hidden()
    page.get_by_label("Batch size").fill("8")
    expect(page.locator("#try-figures dd").first).to_have_text("8 s")


def test_a_published_shape_is_planned_and_told_with_all_that_the_command_needs(open_plan: OpenPage) -> None:
    page = open_plan()
    bodies: list[dict[str, Any]] = []

    def whole_job(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        bodies.append(body)
        worn = {"ssd_write_tb": 2343.75, "ssd_endurance_percent": 97.7}
        totals = {"num_steps": 1875, "job_s": 18_720.0, **worn} if "num_examples" in body else {}
        route.fulfill(json=plan_of(body, **totals, hardware=machine_of("rtx4090:ssds=2").model_dump(), num_compared=12))

    page.route(PLANS, whole_job)
    page.goto(f"{page.url.partition('#')[0]}#/plan?model=llama-3.1-8b&clip_norm=0.5&cut_matrices=1048576&epochs=2")
    expect(page.locator("#try-headline")).to_have_text("It fits: 16 s a step")
    expect(page.get_by_label("Model", exact=True).locator(":checked")).to_have_text(
        "llama-3.1-8b (8.03 billion parameters)"
    )
    groups = page.get_by_label("Model", exact=True).locator("optgroup").evaluate_all("all => all.map(one => one.label)")
    assert groups == ["Models of this service", "Published shapes"]
    asked = {"clip_norm": 0.5, "cut_matrices": 1048576, "epochs": 2}
    assert (bodies[-1]["model"], bodies[-1]["windlass"]) == ("llama-3.1-8b", asked)
    expect(page.locator("#try-sure")).to_have_text("The range holds in nine of ten jobs, by 12 jobs of this machine.")
    page.get_by_label("Training examples").fill("15000")
    job_time = page.locator("#try-job-time")
    expect(job_time).to_have_text(
        "The whole job: 5 h 12 min for 1,875 steps, without loading and evaluations. "
        "It writes 2,344 TB, 1,172 TB to each of 2 SSDs, 97.7 % of the least rated endurance."
    )
    page.click("#try-use summary")
    command = page.locator("#try-command")
    for option in ("--clip-norm 0.5", "--cut-matrices 1048576", "--epochs 2", "--num-examples 15000"):
        expect(command).to_contain_text(option)
    expect(page.locator("#try-curl")).to_contain_text('"model": "MODEL"')
    page.click("#try-all-choices summary")
    expect(page.locator("#try-choices tr").nth(1)).to_have_text(
        re.compile("^micro-batches at once.*that go through each block together")
    )
    assert page.locator("#try-batch_size").get_attribute("max") == "65536"
    assert page.locator("#try-gpus").get_attribute("max") == "16"

    page.get_by_text("Start again").click()
    expect(job_time).to_be_hidden()
    expect(page.get_by_label("Clip norm")).to_have_value("1")
    page.go_back()
    expect(job_time).to_be_visible()
    expect(page.get_by_label("Clip norm")).to_have_value("0.5")
    assert bodies[-1]["windlass"] == asked


def test_page_of_a_job_that_does_not_fit_tells_what_else_the_least_gpu_memory_takes(open_plan: OpenPage) -> None:
    page = open_plan()
    refused = {
        "feasible": False,
        "reasons": ["the job lacks 1.50 TiB on the SSDs", "it fits with 3.50 TiB on the SSDs"],
        "missing_bytes": {"gpu": 0, "host": 0, "ssd": 1.5 * 2**40},
        "missing_together": True,
        "peak_gib": None,
        "least_gpu_reason": "the logits of the head 1.62 GiB; this is with enough of the other memory",
    }
    page.route(PLANS, lambda route: route.fulfill(json=plan_of(json.loads(route.request.post_data or ""), **refused)))
    page.click("#to-plan")
    expect(page.locator("#try-headline")).to_have_text("The job lacks 1.50 TiB on the SSDs")
    expect(page.locator("#try-refusal-title")).to_have_text("It does not fit")
    expect(page.locator("#try-least-gib")).to_have_text(
        "The least GPU memory for this job is 3.5 GiB, with enough of the other memory"
    )


@pytest.mark.long
def test_the_service_plans_what_the_page_asks(service: LiveService, open_plan: OpenPage) -> None:
    folder = service.settings.models_dir / "llama"
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(
        **shape, num_attention_heads=4, max_position_embeddings=128, architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    page = open_plan("#/plan?model=llama&batch_size=4&machine=rtx4090&gpu_memory=8", expected=REFUSED)
    expect(page.locator("#try-headline")).to_have_text(re.compile(r"It fits: \S+ s a step$"), timeout=60_000)
    expect(page.locator("#try-memory li").first).to_contain_text("of 8.0 GiB")
    page.get_by_label("Sequence length").fill("1000")
    expect(page.locator("#try-sequence_length-error")).to_have_text("the model takes at most 128 tokens, got 1000")
    page.get_by_label("Sequence length").fill("")
    page.get_by_label("Micro-batches", exact=True).fill("5")
    expect(page.locator("#try-num_microbatches-error")).to_contain_text("a batch has only 4 examples")
    page.get_by_label("Micro-batches", exact=True).fill("")
    page.get_by_label("Clip gradients").select_option("off")
    expect(page.locator("#try-delta")).to_contain_text("clip gradients on → off", timeout=60_000)
