"""The throughputs that papers print, and windlass's plans for the same jobs."""

from dataclasses import replace

import pytest

from benchmarks.papers.published.throughput import (
    planned,
    published_throughputs,
    server_of_products,
    step_s_of,
    step_tflops,
)
from benchmarks.papers.throughput_table import _two_figures_of_one_run
from windlass.planner.hardware.model_shape import ModelShape


def test_products_are_faster_than_the_pass_that_has_them_and_about_as_fast_as_the_data_sheet() -> None:
    assert 145.8 < server_of_products().gpus.tflops < 165


def test_a_rate_and_its_step_are_one_statement() -> None:
    assert step_tflops(step_s_of(135.0)) == pytest.approx(135)
    assert step_s_of(135.0) == pytest.approx(3 * 869 / 135, rel=0.001)


def test_each_printed_throughput_is_one_number_of_a_job_that_the_machine_can_have() -> None:
    for each in published_throughputs():
        assert (each.tflops is None) != (each.tokens_per_s is None)
        assert each.num_gpus <= min(each.batch_size, each.hardware.gpus.count)
    assert {each.paper for each in published_throughputs()} == {"Ratel", "MemAscend"}


def test_a_job_is_planned_without_clipping_for_its_batch() -> None:
    shape = ModelShape(num_layers=2, hidden_size=256, num_heads=4, vocab_size=1000)
    job = replace(published_throughputs()[0], shape=shape, batch_size=4, num_tokens=64)
    report = planned(job)
    assert report.feasible
    assert report.step_s is not None
    assert report.tokens_per_s == pytest.approx(4 * 64 / report.step_s)


def test_the_page_tells_why_two_figures_of_one_run_differ() -> None:
    text = " ".join(_two_figures_of_one_run())
    for figure in ("174 TFLOPS", "104 TFLOPS", "19.3 s", "1.00 and 0.80"):
        assert figure in text
