"""A job and `windlass.offload` unmap their shared memory when they end, even if something still holds their objects."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.actors.offload_models import Gpt, gpt_loss, offloaded, seeded
from tests.support.training import has_direct_io, make_partition, make_spec
from windlass.actors.runtime.local_runner import run_local


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count(".arena")


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Objects in cycles are not collected, as they may be long in a large process."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
def test_a_job_unmaps_its_arena(tmp_path: Path) -> None:
    before = num_mapped()
    spec = make_spec(tmp_path, total_steps=1)
    run_local(spec, partition=make_partition(spec), direct=has_direct_io(tmp_path))
    assert num_mapped() == before


def test_a_closed_optimizer_unmaps_its_arena_while_the_model_lives(tmp_path: Path) -> None:
    gc.collect()  # else an arena of an earlier test may be counted, and collected meanwhile
    before = num_mapped()
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        gpt_loss(model, 0).backward()
        optimizer.step()
        model.state_dict()
        assert num_mapped() > before
        optimizer.close()
        gc.collect()
        assert num_mapped() == before
