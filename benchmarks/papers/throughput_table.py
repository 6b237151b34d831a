"""The table of `benchmarks.papers` about printed throughputs: each beside windlass's plan for the same job."""

from benchmarks.papers.published.stages import (
    NUM_EXAMPLES,
    PUBLISHED_STAGES,
    RATEL_SWAPPED_NBYTES,
    computed_stages,
    ratel_server,
)
from benchmarks.papers.published.throughput import (
    OTHER_BATCHES,
    PublishedThroughput,
    at_its_best_batch,
    planned,
    published_throughputs,
    server_of_products,
    step_s_of,
    step_tflops,
    with_faster_adam,
)
from benchmarks.reporting.page import Page
from windlass.planner.question import PlanReport

_TFLOPS_OF_V_F = 135


def add_throughputs(page: Page) -> dict[str, float]:
    """Adds the plans beside the printed throughputs. Returns the figures of the last line."""
    page.add(
        "## What papers reach, and what windlass plans",
        "Every throughput that the three papers print as a number, for a transformer that windlass trains. Planned: "
        "the "
        "step that `windlass plan --no-clip` promises for the same model, batch and machine, without clipping as in "
        "the "
        "papers. TFLOPS are the model's own operations, three forward passes, without recomputation. Ratel's server "
        "has "
        f"the rates above, with {server_of_products().gpus.tflops:.0f} TFLOPS of products: windlass counts operators "
        "that only move memory apart from products, and with that rate its forward pass computes for the printed 5.96 "
        "s. "
        "(The data sheet says 165.) MemAscend's first server has the rates of its shipped profile.",
    )
    rows, figures = [], dict[str, float]()
    missed: list[tuple[PublishedThroughput, PlanReport, float]] = []
    for each, report in map(at_its_best_batch, published_throughputs()):
        assert report.tflops is not None, "each of these jobs fits"
        assert report.tokens_per_s is not None
        assert report.step_s is not None
        unit, published, found = (
            ("TFLOPS", each.tflops, report.tflops)
            if each.tokens_per_s is None
            else ("tokens/s", each.tokens_per_s, report.tokens_per_s)
        )
        assert published is not None
        ratio = found / published
        rows.append(
            (
                f"{each.paper}, {each.where}",
                each.model,
                each.machine,
                f"{each.batch_size} x {each.num_tokens}{'' if each.has_batch else ' (taken)'}",
                f"{published:.4g} {unit}",
                f"{found:.4g} {unit}",
                f"{ratio:.2f}",
                f"{report.step_s:.3g}",
                str(report.bottleneck),
                _on_ssds(report),
            )
        )
        if ratio < 1:
            missed.append((each, report, ratio))
    figures["throughputs_missed"] = len(missed)
    figures["throughput_over_published_min"] = min(float(row[6]) for row in rows)
    page.add_table(
        ("paper", "model", "machine", "batch", "published", "planned", "ratio", "step, s", "busiest", "on SSDs"),
        rows,
    )
    page.add(
        "Not printed, and so taken: the batch of Ratel's figure 5c, which shows a maximum, as the faster of "
        f"{' and '.join(map(str, OTHER_BATCHES))}; and its peak, that of a transformer block without transfers, for "
        "which the 145.8 TFLOPS of the forward pass stand. MemAscend's batch is taken as that of both GPUs together, "
        "the harder reading. It trains in fp16, so all gradients wait until they are known to be finite. All other "
        "throughputs of the two are only drawn, or ratios over other systems. AutoHete prints ratios only.",
        "*On SSDs*: blocks whose states the plan keeps there; the others' are in RAM or on the GPU. Ratel and "
        "MemAscend "
        "keep all on SSDs, though their servers have 768 GB and 1 TB of RAM.",
        *(_reason(each, report, ratio) for each, report, ratio in missed),
        *_two_figures_of_one_run(),
    )
    return figures


def _on_ssds(report: PlanReport) -> str:
    """Says how many of a model's blocks have their states on the SSDs."""
    assert report.choices is not None
    on_ssd = report.choices["states_on_ssd"]
    return f"{on_ssd} of {on_ssd + report.choices['states_on_host'] + report.choices['states_on_gpu']}"


def _reason(published: PublishedThroughput, report: PlanReport, ratio: float) -> str:
    """Says what a step that misses the published rate is bound by."""
    assert report.busy_s is not None
    assert report.step_s is not None
    assert report.bound_s is not None
    busy = ", ".join(
        f"{name} {seconds:.3g} s" for name, seconds in sorted(report.busy_s.items(), key=lambda item: -item[1])[:3]
    )
    at_best = (report.tflops or 0.0) * report.step_s / report.bound_s
    return (
        f"{published.paper}, {published.where}, {published.model}: {1 - ratio:.1%} short. Of the planned step of "
        f"{report.step_s:.3g} s are busy: {busy}. No resource or chain alone takes more than {report.bound_s:.3g} s, "
        f"which would be {at_best:.0f} TFLOPS; in the rest they wait for each other."
        f"{_with_faster_adam(published, report)}"
    )


def _with_faster_adam(published: PublishedThroughput, report: PlanReport) -> str:
    """Says what a faster Adam would give, if it gives more."""
    faster = planned(with_faster_adam(published)).tflops or 0.0
    return f" With one twice as fast the plan has {faster:.0f} TFLOPS." if faster > (report.tflops or 0.0) else ""


def _two_figures_of_one_run() -> tuple[str, ...]:
    """Explains the stages of figure 1c, which contradict other statements of the same paper."""
    (published,) = (each for each in PUBLISHED_STAGES if each.system == "Ratel")
    forward_s, backward_s, _ = published.seconds
    whole_s = forward_s + backward_s
    server, computed = ratel_server(), computed_stages("Ratel", swapped_nbytes=RATEL_SWAPPED_NBYTES)
    needed = step_tflops(forward_s) / 3
    compute_s = computed.forward.gpu_s
    of_section = f"{_TFLOPS_OF_V_F} for the same model, a batch of {NUM_EXAMPLES} and twelve SSDs"
    later = computed.backward.time_s(overlaps=True) / (whole_s - compute_s)
    return (
        f"**Ratel's two stages.** Its figure 1c, {forward_s:g} and {backward_s:g} s, is the one run that the "
        "arithmetic "
        "does not reproduce, and it contradicts the rest of the paper. Forward: "
        f"{forward_s:g} s would take {needed:.0f} TFLOPS, more than the {server.gpus.tflops:.0f} of section III-C and "
        "than the 165 of the data sheet. The head does not explain it: without it the pass is 2 percent shorter. A "
        "kernel's launch returns at once. So a clock of the host that stops when forward returns leaves out the work "
        f"that is still queued. If the missing {compute_s - forward_s:.2f} s went to backward, the ratios would be "
        "1.00 "
        f"and {later:.2f}.",
        f"The whole: {whole_s:g} s a step are {step_tflops(whole_s):.0f} TFLOPS. Section V-F prints {of_section}, "
        "which "
        f"takes {step_s_of(_TFLOPS_OF_V_F):.1f} s. Section V-C's 90 to 95 percent of the peak agree with that. The "
        f"computed {computed.iteration_s:.1f} s with 34 GiB swapped lie between the two. So figure 1c shows a run some "
        f"{whole_s - step_s_of(_TFLOPS_OF_V_F):.0f} s slower than Ratel's own best. By the paper's words the GPU then "
        "computes for 11.9 s and 32 percent more in backward, so it waits for some 4 s of the 20. No rate on this page "
        "was changed to fit that run.",
    )
