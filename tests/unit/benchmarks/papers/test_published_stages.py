"""The figures printed in Ratel's paper, compared with one set of rates for all systems."""

import pytest

from benchmarks.papers.published.stages import (
    FIGURE_9B_BATCHES,
    PUBLISHED_STAGES,
    RATEL_SWAPPED_NBYTES,
    PublishedStages,
    computed_stages,
    one_by_one_gb_per_s,
    ratel_profile,
    ratel_server,
    statements,
    with_host_memory,
    with_ssd_rate,
)
from windlass.amounts import GIB
from windlass.planner.baselines.ratel_swap import Case
from windlass.planner.baselines.system_stages import POLICIES, best_amount
from windlass.planner.hardware.hardware import unusual


@pytest.mark.parametrize("published", PUBLISHED_STAGES[:2], ids=lambda published: published.system)
def test_serial_and_simulated_systems_come_within_15_percent(published: PublishedStages) -> None:
    assert computed_stages(published.system).seconds == pytest.approx(published.seconds, rel=0.15)


def test_ratels_stages_are_not_explained_and_its_step_nearly() -> None:
    """If this fails, the text of the page must change."""
    ratel = computed_stages("Ratel", swapped_nbytes=RATEL_SWAPPED_NBYTES)
    assert ratel.seconds == pytest.approx((5.96, 15.3, 0), abs=0.05)
    assert ratel.iteration_s == pytest.approx(25, rel=0.155)


def test_figures_in_the_text_come_within_15_percent() -> None:
    found = statements()
    assert [each.computed for each in found] == pytest.approx([each.published for each in found], rel=0.15)


def test_rates_are_those_of_the_papers_statements() -> None:
    server, profile = ratel_server(), ratel_profile()
    assert unusual(server) == []
    assert profile.num_flops / server.gpus.tflops / 1e12 == pytest.approx(5.96)
    assert 28 * server.host.adam_params_per_s == pytest.approx(32e9)
    assert one_by_one_gb_per_s() == pytest.approx(4.11, abs=0.005)
    assert ratel_profile(16).num_flops * 2 == profile.num_flops


def test_the_published_amount_is_chosen_at_26_gb_per_s() -> None:
    server, profile, policy = ratel_server(), ratel_profile(), POLICIES["Ratel"]
    slower = with_host_memory(with_ssd_rate(server, 26), 1)
    found = best_amount(policy, slower, profile)
    assert found.case is Case.BETWEEN
    assert found.nbytes / GIB == pytest.approx(34, rel=0.05)
    assert best_amount(policy, server, profile).nbytes / GIB > 100


def test_cases_over_the_batch_are_those_printed_at_26_gb_per_s() -> None:
    """Figure 9b: with batch 24 more is never better, with larger batches it is up to a point."""
    server = with_host_memory(with_ssd_rate(ratel_server(), 26), 1)
    cases = [best_amount(POLICIES["Ratel"], server, ratel_profile(batch)).case for batch in FIGURE_9B_BATCHES]
    assert cases == [Case.LEAST, *[Case.BETWEEN] * 3]
    at_32 = with_host_memory(ratel_server(), 1)
    assert best_amount(POLICIES["Ratel"], at_32, ratel_profile(24)).case is Case.BETWEEN
