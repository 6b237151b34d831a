"""A job planned again with one more SSD, more RAM, another GPU, a larger batch or another setting."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.pretend_measurement import pretend_to_measure
from windlass.amounts import GIB
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.answers import what_if
from windlass.planner.answers.what_if import changes_of, with_what_if
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.planning import measuring_first
from windlass.planner.planning.planner import Planned, answer
from windlass.planner.planning.simulated_search import Watcher
from windlass.planner.profiling.block_times import MAX_S
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport
from windlass.storage.ids import Precision, StatePrecision

# Bound by its SSD: it holds all states, and writes slowly.
CONFIG = config_of_shape(ModelShape(num_layers=2, hidden_size=512, num_heads=4, vocab_size=1000), num_tokens=256)


def question(hardware: Hardware, **changes: Any) -> PlanQuestion:
    training = TrainingConfig(batch_size=4, num_microbatches=1, sequence_length=256, total_steps=1)
    return PlanQuestion(
        config=CONFIG,
        hardware=hardware,
        training=training,
        chooses_microbatches=True,
        host_memory_nbytes=GIB,
        **changes,
    )


def small_desktop() -> Hardware:
    machine = machine_of("rtx4090")
    return with_part(machine, host=with_part(machine.host, memory_gib=3.0))


def test_an_answer_is_the_plan_of_such_a_machine() -> None:
    asked = replace(question(small_desktop()), chooses_microbatches=False)
    asked = asked.changed(commit_minutes=0.0)  # so that states in host memory need the SSDs, too
    report = with_what_if(asked, answer(asked)).report
    assert report.what_if is not None
    rows = {row.key: row for row in report.what_if}
    for change in changes_of(asked):
        if change.key == "ssds":
            planned = answer(change.question).report
            row = rows[change.key]
            assert (row.step_s, row.tokens_per_s) == (planned.step_s, planned.tokens_per_s)
            assert row.gain == pytest.approx(planned.tokens_per_s / report.tokens_per_s - 1)
    rates = [row.tokens_per_s for row in report.what_if]
    assert rates == sorted(rates, reverse=True)
    assert rows["ssds"].gain > 0
    assert rows["box"].change == "a second such box, over 10 Gbit/s"


@pytest.mark.parametrize(
    ("error", "told"),
    [(ValueError("empty"), "a defect of the planner (ValueError: empty)"), (MemoryError(), "got no more memory")],
)
def test_a_change_that_cannot_be_planned_says_so_in_its_row(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(question: PlanQuestion, _: Profiles) -> Planned:
        if question.training.batch_size == 8:
            raise error
        return Planned(report=PlanReport(feasible=True, reasons=(), step_s=2.0, tokens_per_s=5.0))

    def fail_over_boxes(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(what_if, "plan_without_advice", fail)
    monkeypatch.setattr(what_if, "best_plans", fail_over_boxes)
    planned = Planned(report=PlanReport(feasible=True, reasons=(), step_s=1.0, tokens_per_s=10.0))
    report = with_what_if(question(small_desktop()), planned).report
    assert replace(report, what_if=None) == planned.report
    rows = {row.key: row for row in report.what_if or ()}
    assert (rows["ssds"].gain, rows["ssds"].problem) == (-0.5, None)
    for key in ("batch", "box"):
        assert (rows[key].feasible, rows[key].step_s, rows[key].gain) == (False, None, None)
        assert told in (rows[key].problem or "")


def test_a_job_that_does_not_fit_is_told_with_what_it_would() -> None:
    machine = small_desktop()
    asked = replace(
        question(with_part(machine, host=with_part(machine.host, memory_gib=1.55))),
        host_memory_nbytes=None,
        chooses_microbatches=False,
    )
    report = with_what_if(asked, Planned(report=PlanReport(feasible=False, reasons=()))).report
    rows = {row.key: row for row in report.what_if or ()}
    assert (rows["ram"].feasible, rows["ram"].gain) == (True, None)
    assert not rows["ssds"].feasible
    assert [row.feasible for row in report.what_if or ()] == [True, *[False] * 7]


def test_changes_are_of_one_thing_each() -> None:
    asked = question(machine_of("rtx4090:ssds=3"), device_memory_nbytes=20 * GIB)
    changes = {change.key: change.question for change in changes_of(asked)}
    assert changes["ssds"] == replace(asked, hardware=machine_of("rtx4090:ssds=4"))
    assert changes["ram"].host_memory_nbytes == 65 * GIB
    assert changes["ram"].hardware.host.memory_gib == 60 + 64
    assert changes["card"].hardware.gpus == machine_of("rtx5090").gpus
    assert changes["card"].device_memory_nbytes == 28 * GIB
    assert changes["gpus"].hardware == machine_of("rtx4090:gpus=2,ssds=3")
    two = changes["gpus"]
    assert (two.num_ranks, two.training.lanes, two.training.num_microbatches) == (2, 1, 2)
    assert changes["batch"].training.batch_size == 8


@pytest.mark.parametrize(
    ("ram", "words"), [(64, "64 GiB more RAM"), (128, "64 GiB more RAM (all of it at 40 GB/s, now 60)")]
)
def test_more_ram_of_a_desktop_is_as_fast_as_its_board_runs_it(ram: int, words: str) -> None:
    (change,) = [change for change in changes_of(question(machine_of(f"rtx4090:ram={ram}"))) if change.key == "ram"]
    assert change.words == words
    assert change.question.hardware == machine_of(f"rtx4090:ram={ram + 64}")


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (1, "one more GPU, 2 in all (the link of each at 12.5 GB/s, now 25)"),
        (2, "two more GPUs, 4 in all (the link of each at 6.2 GB/s, now 12.5)"),
    ],
)
def test_change_says_how_many_gpus_more_there_are(gpus: int, words: str) -> None:
    asked = question(machine_of(f"rtx4090:gpus={gpus}"), num_ranks=gpus)
    asked = replace(asked, training=replace(asked.training, lanes=gpus, num_microbatches=gpus))
    assert words in [change.words for change in changes_of(asked)]


def test_a_fixed_number_of_microbatches_keeps_their_size_and_may_leave_a_gpu_without_one() -> None:
    asked = replace(question(machine_of("rtx4090")), chooses_microbatches=False)
    changes = {change.key: change.question for change in changes_of(asked)}
    assert "gpus" not in changes
    assert (changes["batch"].training.batch_size, changes["batch"].training.num_microbatches) == (8, 2)


def test_a_cpu_has_no_faster_card() -> None:
    machine = machine_of("rtx4090")
    asked = question(with_part(machine, gpus=with_part(machine.gpus, count=0)))
    changes = list(changes_of(asked))
    assert [change.key for change in changes] == ["ssds", "ram", "batch", "clip", "split_states", "bf16_states"]
    assert all(change.question.pace is asked.pace for change in changes), "rows of one answer can be compared"


@pytest.mark.parametrize(
    ("setting", "keys"),
    [
        ({}, ["clip", "split_states", "bf16_states"]),
        ({"clip_norm": None}, ["split_states", "bf16_states"]),
        ({"state_precision": StatePrecision.SPLIT}, ["clip", "bf16_states"]),
        ({"state_precision": StatePrecision.BF16}, ["clip"]),
        ({"precision": Precision.FP16}, []),  # an overflow skips the step, so all gradients must be known
        ({"precision": Precision.FP32}, ["clip"]),
    ],
)
def test_settings_that_may_take_less_are_changes_with_what_they_give_up(
    setting: dict[str, Any], keys: list[str]
) -> None:
    asked = question(machine_of("rtx4090")).changed(**setting)
    words = {
        "clip": "without gradient clipping (clip_norm: null, gradient_updates: auto): large gradients are not limited",
        "split_states": "states in less space (state_precision: split), with the same results",
        "bf16_states": "states in bf16 (state_precision), which is less exact",
    }
    found = {change.key: change for change in changes_of(asked) if change.key in words}
    assert [(key, change.words) for key, change in found.items()] == [(key, words[key]) for key in keys]
    assert all(change.question.hardware == asked.hardware for change in found.values())


def test_job_without_clipping_updates_in_the_faster_order() -> None:
    """As one that a request without clipping gets."""
    clipped = question(machine_of("rtx4090"))
    for order, then in (
        (None, (UpdateOrder.ACTIVE, True)),
        (UpdateOrder.AFTER_BACKWARD, (UpdateOrder.AFTER_BACKWARD, False)),
    ):
        (change,) = (each for each in changes_of(clipped.changed(update_order=order)) if each.key == "clip")
        assert change.question.training.clip_norm is None
        assert (change.question.training.update_order, change.question.chooses_order) == then


def test_a_shared_limit_of_ssds_stays_and_is_told() -> None:
    asked = question(machine_of("rtx4090-server"))
    (change,) = [change for change in changes_of(asked) if change.key == "ssds"]
    assert change.question.hardware.ssds.combined_gb_per_s == asked.hardware.ssds.combined_gb_per_s == 32
    assert change.words == "one more SSD, 13 in all (together at most 32 GB/s, as now)"


def test_each_planned_change_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "_answer", lambda change, profiles, now: what_if._row(change.key, "", 1.0, 1.0, now))
    monkeypatch.setattr(what_if, "_with_second_box", lambda *_: what_if._row("box", "", None, None, None))
    told: list[tuple[int, int]] = []

    def tell(so_far: Planned, num_left: int) -> None:
        rates = [row.tokens_per_s for row in so_far.report.what_if or ()]
        assert rates == [1.0] * len(rates)
        told.append((len(rates), num_left))

    planned = Planned(report=PlanReport(feasible=False, reasons=()))
    with_what_if(question(small_desktop()), planned, tell=tell)
    assert told == [(number, 9 - number) for number in range(9)]


def on_cpu(**changes: Any) -> PlanQuestion:
    """The question of a job on a machine without a GPU whose blocks can be measured."""
    machine = small_desktop()
    cpu = with_part(machine, gpus=with_part(machine.gpus, count=0))
    return replace(question(cpu, measures=True, **changes), chooses_microbatches=False)


def test_times_that_changes_lack_are_measured_before_they_are_planned_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend_to_measure(monkeypatch)
    monkeypatch.setattr(measuring_first, "fits", lambda *_: True)
    monkeypatch.setattr(what_if, "_answer", lambda change, profiles, now: what_if._row(change.key, "", 1.0, 1.0, now))
    monkeypatch.setattr(what_if, "_with_second_box", lambda *_: what_if._row("box", "", None, None, None))
    told: list[object] = []
    watcher = Watcher(see_measurement=lambda what, done, total: told.append((what, done, total)))
    planned = Planned(report=PlanReport(feasible=True, reasons=(), step_s=1.0, tokens_per_s=10.0))
    with_what_if(on_cpu(), planned, watcher, tell=lambda so_far, _: told.append(len(so_far.report.what_if or ())))
    what = "the model's blocks with 4 examples of 256 tokens"
    assert told == [(what, 0, 2), (what, 1, 2), *range(7)], "a batch twice as large has sums of gradients"
    assert len(measured) == 2


def test_changes_of_a_job_whose_blocks_stay_unmeasured_are_compared_with_it_by_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(question: PlanQuestion, profiles: Profiles) -> Planned:
        assert profiles.is_by_rates
        rate = 40.0 if question.training.batch_size == 8 else 20.0
        return Planned(report=PlanReport(feasible=True, reasons=(), step_s=1.0, tokens_per_s=rate))

    monkeypatch.setattr(measuring_first, "fits", lambda *_: True)
    monkeypatch.setattr(what_if, "plan_without_advice", plan)
    monkeypatch.setattr(what_if, "best_plans", lambda *_, **__: [])
    planned = Planned(report=PlanReport(feasible=True, reasons=(), step_s=1.0, tokens_per_s=10.0, times_from="blocks"))
    report = with_what_if(on_cpu(leaves_unmeasured=True), planned).report
    same = dict.fromkeys(("ssds", "ram", "clip", "split_states", "bf16_states"), 0.0)
    assert {row.key: row.gain for row in report.what_if or ()} == {"batch": 1.0, "box": None, **same}
    assert (report.tokens_per_s, report.measuring_s) == (10.0, 2 * MAX_S)
