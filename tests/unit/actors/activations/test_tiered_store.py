"""Activations in host memory and on real SSD servers: every byte returns, and nothing is left behind."""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.actors.swap_bench import SLOT_NBYTES, WAIT_S, SwapBench, make_swap_context, some_bytes
from tests.support.engine.activation_runs import Run
from tests.support.engine.architectures import ARCHITECTURES, NUM_LAYERS, make_batch, make_model
from tests.support.examples import examples
from tests.support.training import has_direct_io
from windlass.actors.messages import SpanKind
from windlass.engine.activations.host_store import ActivationMemoryError
from windlass.engine.activations.store import SwapCounts, SwapHandle
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.storage.ids import BlockIndex, Step
from windlass.storage.ssd.volume import Volume


def make_bench(root: Path, monkeypatch: pytest.MonkeyPatch, **facts: object) -> SwapBench:
    context = make_swap_context(root, **facts)  # type: ignore[arg-type]
    return SwapBench(monkeypatch, context, direct=has_direct_io(root))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwapBench]:
    """A store with two slots in host memory and 32 on one SSD."""
    bench = make_bench(tmp_path, monkeypatch)
    yield bench
    bench.close()


def jobs_on(directory: str) -> list[str]:
    volume = Volume.open(directory, direct=False)
    try:
        return list(volume.allocations())
    finally:
        volume.close()


class TestBytes:
    def test_fill_host_memory_first_then_the_ssds(self, bench: SwapBench) -> None:
        tensors = [some_bytes(nbytes, nbytes) for nbytes in (SLOT_NBYTES, 5 * SLOT_NBYTES - 9, 100)]
        handles = [bench.store.put(tensor) for tensor in tensors]
        assert bench.store._host.counts.held_nbytes == 2 * SLOT_NBYTES  # the second tensor is in both
        assert bench.store.ssd_counts.held_nbytes == 4 * SLOT_NBYTES - 9 + 100
        for handle, tensor in zip(reversed(handles), reversed(tensors), strict=True):
            back = bench.store.get(handle)
            assert torch.equal(back, tensor)
            assert (back.storage_offset(), back.untyped_storage().nbytes()) == (0, tensor.nbytes)
        total = 6 * SLOT_NBYTES - 9 + 100
        assert bench.store.counts == SwapCounts(
            out_nbytes=total, in_nbytes=total, held_nbytes=0, peak_held_nbytes=total
        )
        for counts in (bench.store._host.counts, bench.store.ssd_counts):
            assert counts.out_nbytes == counts.in_nbytes == counts.peak_held_nbytes > 0
            assert counts.held_nbytes == 0
        assert sum(server.bytes_written for server in bench.servers.values()) == 5 * SLOT_NBYTES  # whole pages
        bench.wait_until_free()

    def test_lie_on_all_ssds_by_their_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = make_bench(tmp_path, monkeypatch, num_host=0, num_staged=3, num_ssd=16, weights=(3, 1))
        handle = bench.store.put(some_bytes(12 * SLOT_NBYTES))
        assert torch.equal(bench.store.get(handle), some_bytes(12 * SLOT_NBYTES))
        written = [server.bytes_written for server in bench.servers.values()]
        assert written == [9 * SLOT_NBYTES, 3 * SLOT_NBYTES]
        bench.close()

    def test_full_space_is_an_error_that_names_the_setting(self, bench: SwapBench) -> None:
        first = bench.store.put(some_bytes(20 * SLOT_NBYTES))
        text = r"15 slots of 4.00 KiB .* 18 of 32 are in use; raise ssd_activation_nbytes of the placement"
        with pytest.raises(ActivationMemoryError, match=text):
            bench.store.put(some_bytes(15 * SLOT_NBYTES))
        second = bench.store.put(some_bytes(14 * SLOT_NBYTES))  # to the last slot
        with pytest.raises(ActivationMemoryError):
            bench.store.put(some_bytes(1))
        assert torch.equal(bench.store.get(first), some_bytes(20 * SLOT_NBYTES))
        assert torch.equal(bench.store.get(second), some_bytes(14 * SLOT_NBYTES))
        bench.wait_until_free()

    def test_tiered_activations_are_reported_to_the_timeline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = make_bench(tmp_path, monkeypatch, num_host=0, num_staged=4)
        bench.store.begin(Step(3), BlockIndex(2))
        handle = bench.store.put(some_bytes(2 * SLOT_NBYTES))
        bench.store.begin(Step(3), BlockIndex(3))
        bench.store.get(handle)
        bench.store.flush()
        bench.close()
        waits = [span for span in bench.spans if span.kind is SpanKind.WAIT_ACTIVATIONS]
        assert {(span.resource, span.step, span.block) for span in waits} <= {("gpu-0/compute", 3, 3)}
        kinds = ["write_activations", "read_activations", "copy_activations_out", "copy_activations_in"]
        found = {kind: [span for span in bench.spans if span.kind == kind] for kind in map(SpanKind, kinds)}
        assert sum(map(len, found.values())) + len(waits) == len(bench.spans)
        for spans in found.values():
            assert sum(span.nbytes for span in spans) == 2 * SLOT_NBYTES
            assert {(span.step, span.block, span.chunk) for span in spans} == {(3, 2, -1)}
        assert {span.resource for each in found.values() for span in each} == {"ssd-0", "gpu-0/d2h", "gpu-0/h2d"}


def num_slots(nbytes: int) -> int:
    return -(-nbytes // SLOT_NBYTES)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_order_of_calls(data: st.DataObject) -> None:
    """Compared with a dictionary: every put that should fit does, no other does, and no call deadlocks."""
    num_host, num_staged = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 9))
    num_ssd, weights = (
        data.draw(st.integers(num_staged, 30)),
        data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)),
    )
    monkeypatch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory() as name:
        context = make_swap_context(
            Path(name), num_host=num_host, num_staged=num_staged, num_ssd=num_ssd, weights=weights
        )
        bench = SwapBench(monkeypatch, context, direct=False)
        held: dict[SwapHandle, torch.Tensor] = {}
        coming: set[SwapHandle] = set()
        for i in range(data.draw(st.integers(1, 40))):
            act = data.draw(st.sampled_from(["put", "put", "prefetch", "get", "drop"]))
            if act == "put":
                tensor = some_bytes(data.draw(st.integers(1, 6 * SLOT_NBYTES)), i)
                room = num_host + num_ssd - num_slots(tensor.nbytes)
                if sum(num_slots(handle.nbytes) for handle in held) <= room:
                    held[bench.store.put(tensor.clone())] = tensor
                elif sum(num_slots(handle.nbytes) for handle in held.keys() - coming) > room:
                    with pytest.raises(ActivationMemoryError):
                        bench.store.put(tensor)
                # Otherwise it depends on the progress of tensors that are read back.
            elif held:
                handle = data.draw(st.sampled_from(list(held)))
                if act == "prefetch":
                    bench.store.prefetch(handle)
                    coming.add(handle)
                elif act == "get":
                    assert torch.equal(bench.store.get(handle), held.pop(handle))
                else:
                    bench.store.drop(handle)
                    del held[handle]
        for handle in data.draw(st.permutations(list(held))):
            assert torch.equal(bench.store.get(handle), held[handle])
        bench.wait_until_free()
        assert bench.store.counts.held_nbytes == 0
        assert bench.failures == []
        bench.close()
        assert jobs_on(context.spec.ssd_dirs[0]) == []


def test_two_jobs_on_one_ssd_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each puts, prefetches and gets in its own thread."""
    benches = [make_bench(tmp_path, monkeypatch, job=f"ftjob-{i}", num_host=1, num_staged=2) for i in range(2)]
    wrong: list[object] = []

    def swap(bench: SwapBench, number: int) -> None:
        for round_ in range(20):
            seeds = range(100 * number + 5 * round_, 100 * number + 5 * round_ + 5)
            handles = {bench.store.put(some_bytes(5 * SLOT_NBYTES - seed, seed)): seed for seed in seeds}
            for handle in reversed(handles):
                bench.store.prefetch(handle)
            for handle, seed in reversed(handles.items()):
                if not torch.equal(bench.store.get(handle), some_bytes(handle.nbytes, seed)):
                    wrong.append((number, seed))
        wrong.extend(bench.failures)

    threads = [threading.Thread(target=swap, args=(bench, i)) for i, bench in enumerate(benches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []
    benches[0].close()
    assert jobs_on(benches[1].context.spec.ssd_dirs[0]) == ["ftjob-1"]
    benches[1].close()


class TestFailures:
    def test_a_flipped_bit_is_named_and_its_bytes_never_come(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = make_bench(tmp_path, monkeypatch, num_host=0, deadline_s=1.0)
        handle = bench.store.put(some_bytes(3 * SLOT_NBYTES))
        bench.wait_until_free()  # all of it is on the SSD
        directory = bench.context.spec.ssd_dirs[0]
        volume = Volume.open(directory, direct=False)
        at = volume.allocation(bench.context.spec.job).scratch[0].start * (1 << 20) + SLOT_NBYTES + 5
        volume.device.write_records(at, bytes([volume.device.read_records(at, 1)[0] ^ 1]))
        volume.close()
        with pytest.raises(TimeoutError, match=r"waited 1 s for .* of 12.00 KiB .* to come back from ssd-0"):
            bench.store.get(handle)
        told = bench.failure()
        for fact in (f"SSD {directory}, job ftjob-1, scratch slot 1 (swapped activations)", "checksum is wrong"):
            assert fact in told
        bench.close()

    def test_a_failing_ssd_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = make_bench(tmp_path, monkeypatch, num_host=0)

        def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("os.pwritev", fail)
            handle = bench.store.put(some_bytes(100))
            told = bench.failure()
        assert f"SSD {bench.context.spec.ssd_dirs[0]}, job ftjob-1, scratch slot 0" in told
        assert "could not write: [Errno 5]" in told
        threading.Timer(0.05, bench.device.token.cancel).start()  # as the end of the attempt does
        with pytest.raises(InterruptedError, match="the job was stopped"):
            bench.store.get(handle)
        bench.close()


@pytest.mark.parametrize(
    "policy",
    [
        BlockActivations(recompute=False, swap_input=True, swapped=frozenset({"*"})),
        BlockActivations(swap_input=True, swapped=frozenset({"aten.mm.default", "aten.addmm.default"})),
    ],
    ids=["all swapped", "matrix products swapped"],
)
def test_a_step_through_the_ssds_gives_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: BlockActivations
) -> None:
    model = make_model(ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.1))
    batch, targets = make_batch((2, 16), (1, 9))
    expected = Run(model).step(batch, targets)
    bench = make_bench(tmp_path, monkeypatch, num_host=20, num_staged=5, num_ssd=600, weights=(2, 1))
    activations = {BlockIndex(b): policy for b in range(1, NUM_LAYERS + 1)}
    run = Run(model, activations=activations, store=bench.store)
    for _ in range(2):
        found = run.step(batch, targets)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        for buffer in run.grads.values():
            buffer.touched.clear()
    bench.wait_until_free()
    assert min(server.bytes_read for server in bench.servers.values()) > 0
    assert bench.store._host.counts.in_nbytes > 0
    assert replace(bench.store.counts, peak_held_nbytes=0).held_nbytes == 0
    bench.close()
