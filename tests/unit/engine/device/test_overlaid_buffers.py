"""Buffers of several users in the same memory: one user after the other."""

import threading
from collections.abc import Iterator

import pytest
import torch

from windlass.engine.device.device import Device
from windlass.engine.device.overlaid_buffers import OverlaidBuffers
from windlass.engine.memory_plan.buffer_counts import OVERLAY_ALIGNMENT_NBYTES, grad_overlay_of_job, overlay_nbytes
from windlass.storage.cancellation import CancelToken

LAYERS, HEAD = None, 5
USERS = {
    LAYERS: [(300, torch.bfloat16), (300, torch.bfloat16), (10, torch.bfloat16)],
    HEAD: [(500, torch.float32), (500, torch.bfloat16)],
}


@pytest.fixture
def token() -> Iterator[CancelToken]:
    token = CancelToken(0.3)
    yield token
    token.cancel()


@pytest.fixture
def device(token: CancelToken) -> Device:
    return Device(torch.device("cpu"), poison_released=True, token=token)


def test_users_share_memory_and_a_user_s_buffers_do_not_overlap(device: Device) -> None:
    overlaid = OverlaidBuffers(device, USERS, name="gradients")
    for classes, flats in zip(USERS.values(), overlaid.buffers.values(), strict=True):
        assert [(flat.numel(), flat.dtype) for flat in flats] == classes
        assert all(flat.data_ptr() % OVERLAY_ALIGNMENT_NBYTES == flats[0].data_ptr() % 512 for flat in flats)
        for number, flat in enumerate(flats):
            flat.fill_(number)
        assert all((flat == number).all() for number, flat in enumerate(flats))
    assert len({flats[0].data_ptr() for flats in overlaid.buffers.values()}) == 1


def test_a_user_waits_for_the_others_and_its_work_for_theirs(device: Device) -> None:
    overlaid = OverlaidBuffers(device, USERS, name="gradients")
    overlaid.enter(LAYERS)
    with pytest.raises(TimeoutError, match="the memory for gradients of 5"):
        overlaid.take(HEAD, 500, torch.float32, device.compute)
    copies, copied = device.open_stream(), threading.Event()
    copies.run(copied.wait)
    overlaid.leave({0: copies.record()})
    threading.Timer(0.05, copied.set).start()
    flat = overlaid.take(HEAD, 500, torch.float32, device.compute)
    assert copied.is_set()
    assert overlaid.enter(HEAD) == []
    overlaid.give(flat, device.compute)
    assert not overlaid.has(flat)
    with pytest.raises(TimeoutError):
        overlaid.enter(LAYERS)
    overlaid.leave({1: device.compute.record()})
    assert len(overlaid.enter(LAYERS)) == 2
    assert overlaid.enter(LAYERS) == []
    assert flat.isnan().all()


def test_a_sum_has_the_first_buffer_and_parts_of_a_total_no_sum(device: Device) -> None:
    overlaid = OverlaidBuffers(device, {LAYERS: [], HEAD: [(500, torch.float32)] * 3}, name="gradients")
    flat = overlaid.take(HEAD, 500, torch.float32, device.compute)
    assert flat is overlaid.buffers[HEAD][0]
    with pytest.raises(AssertionError, match="5 has one buffer for a sum"):
        overlaid.take(HEAD, 500, torch.float32, device.compute)


def test_the_start_of_a_buffer_is_released_instead_of_it(device: Device) -> None:
    overlaid = OverlaidBuffers(device, {LAYERS: [], HEAD: [(500, torch.float32)]}, name="gradients")
    wide = overlaid.take(HEAD, 500, torch.float32, device.compute)
    narrow = overlaid.narrow(wide, torch.bfloat16)
    assert overlaid.has(narrow)
    assert not overlaid.has(wide)
    assert (narrow.data_ptr(), narrow.numel()) == (wide.data_ptr(), 500)
    overlaid.give(narrow, device.compute)
    device.compute.record().wait()
    assert wide.isnan().all()
    overlaid.give(overlaid.take(HEAD, 500, torch.bfloat16, device.compute), device.compute)
    assert len(overlaid.enter(LAYERS)) == 1


def test_the_memory_is_that_of_the_user_that_needs_most() -> None:
    assert overlay_nbytes([(512, 1), (1000,), ()]) == 1024
    assert overlay_nbytes([]) == 0
    # A tied embedding is summed in fp32 and rounded in place; the head's own norm is summed as it leaves.
    users = grad_overlay_of_job(
        [1000, 700, 20], {1: (0, 400, 690)}, (0, 2), itemsize=2, summed_in_fp32={0}, is_summed=False
    )
    assert users == {None: [(1424, 2)] * 2 + [(1034, 2)] * 2, 0: [(1000, 4)], 2: [(20, 2)]}
