"""The memory of preparations: bounded, shared among owners, and limited beside running jobs."""

import os
from pathlib import Path

from windlass.service.preparation.memory import PreparationMemory
from windlass.service.preparation.pipeline import LEAST_MEMORY_NBYTES
from windlass.service.preparation.sandbox.process import LimitedProcess
from windlass.service.preparation.steps import CHECK_MODEL, DOWNLOAD_MODEL, PREPARE_DATA, PreparationStep

_GIB = 1024**3


class _Process:
    pid: int | None = os.getpid()

    def halt(self) -> None: ...
    def proceed(self) -> None: ...
    def kill(self) -> None: ...

    def poll(self) -> int | None:
        return None

    def wait(self) -> int:
        return 0


def _step(name: str) -> PreparationStep:
    return PreparationStep(name=name, command=("true",), result_path=Path("result.json"), timeout_s=1)


def _nothing() -> LimitedProcess | None:
    return None


def _grant(memory: PreparationMemory, job_id: str, owner: str, name: str = PREPARE_DATA, *, free: bool = False) -> int:
    return memory.grant(job_id, owner, _step(name), _nothing, is_box_free=free) or 0


def test_preparing_data_gets_a_few_gib_and_other_steps_half_of_the_machine() -> None:
    memory = PreparationMemory(lambda: 200 * _GIB, 64 * _GIB)
    assert _grant(memory, "j1", "ann") == 4 * _GIB
    assert _grant(memory, "j2", "ann", CHECK_MODEL) == 32 * _GIB


def test_a_download_of_hours_leaves_memory_to_other_jobs() -> None:
    memory = PreparationMemory(lambda: 20 * _GIB, 64 * _GIB)
    assert _grant(memory, "j1", "ann", DOWNLOAD_MODEL) == 4 * _GIB
    assert _grant(memory, "j2", "ann", CHECK_MODEL) >= LEAST_MEMORY_NBYTES


def test_an_owner_gets_half_of_what_is_free_and_others_still_get_theirs() -> None:
    memory = PreparationMemory(lambda: 20 * _GIB, 0)
    assert [_grant(memory, f"a{number}", "ann") for number in range(4)] == [4 * _GIB, 4 * _GIB, 2 * _GIB, 0]
    assert _grant(memory, "b1", "bob") == 4 * _GIB
    memory.give_back("a1")
    assert _grant(memory, "a3", "ann") >= LEAST_MEMORY_NBYTES


def test_a_step_waits_for_memory_beside_a_job_and_says_so() -> None:
    memory = PreparationMemory(lambda: 2 * _GIB, 10 * _GIB)
    assert _grant(memory, "j1", "ann") == 0
    assert memory.why_not("ann") == "memory for its preparation: 3.00 GiB needed, 1.50 GiB free beside what runs"


def test_reason_names_free_memory_with_which_owner_would_get_next_grant() -> None:
    free_nbytes = 20 * _GIB
    memory = PreparationMemory(lambda: free_nbytes, 0)
    assert [_grant(memory, f"a{number}", "ann") for number in range(4)] == [4 * _GIB, 4 * _GIB, 2 * _GIB, 0]
    assert memory.why_not("ann") == (
        "another preparation of its owner to end, which may use 10.00 GiB of memory; it begins beside that one once "
        "13.00 GiB are free, and 10.00 GiB are"
    )
    free_nbytes += 3 * _GIB
    assert _grant(memory, "a3", "ann") == LEAST_MEMORY_NBYTES


def test_step_on_idle_machine_begins_with_minimum_memory() -> None:
    memory = PreparationMemory(lambda: _GIB, 4 * _GIB)
    assert _grant(memory, "j1", "ann", free=True) == LEAST_MEMORY_NBYTES
    assert _grant(memory, "j2", "bob", free=True) == 0, "something else runs now"


def test_what_a_process_has_taken_already_is_not_counted_twice() -> None:
    memory = PreparationMemory(lambda: 20 * _GIB, 0)
    memory.grant("j1", "ann", _step(PREPARE_DATA), _Process, is_box_free=True)
    assert 16 * _GIB < memory.free_nbytes() < 20 * _GIB


def test_the_next_step_of_a_job_gives_back_what_the_one_before_got() -> None:
    memory = PreparationMemory(lambda: 20 * _GIB, 0)
    assert [_grant(memory, "j1", "ann") for _ in range(4)] == [4 * _GIB] * 4
