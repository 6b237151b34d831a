"""Advice of plans on faster machines."""

from tests.unit.planner.planning.test_planner import MACHINE, answer, question
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Hardware


def with_gpus(count: int) -> Hardware:
    return with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=count))


def test_reasons_on_a_cpu_name_no_gpu() -> None:
    reasons = answer(question(with_gpus(0), num_microbatches=1)).reasons
    assert any("with a CPU that computes twice as fast a step takes" in reason for reason in reasons)
    assert not any("GPU" in reason for reason in reasons)


def test_gpus_that_a_job_does_not_use_are_told() -> None:
    told = "the job uses 1 of the machine's 2 GPUs (gpus)"
    found = [told in answer(question(with_gpus(count), num_microbatches=1)).reasons for count in (1, 2)]
    assert found == [False, True]
