"""The block runner under the activation policies.

Equality of gradients is tested in engine/activations/test_parity.py.
"""

import traceback

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.engine.activation_runs import MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from windlass.engine.activations.selective_recompute import storage_ref
from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.model.model_forward import ModelForward
from windlass.storage.ids import BlockIndex

ALL = frozenset({"*"})
KEPT = BlockActivations(recompute=False)
INPUT_AWAY = BlockActivations(swap_input=True)
ALL_AWAY = BlockActivations(recompute=False, swap_input=True, swapped=ALL)
BATCH, TARGETS = make_batch((2, 16), (1, 9))
LAYERS = [BlockIndex(b) for b in (1, 2, 3)]


def run_of(policies: dict[BlockIndex, BlockActivations], store: MemoryStore | None = None) -> Run:
    model = make_model(ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.1))
    return Run(model, activations=policies, store=store)


def forward_all(run: Run) -> None:
    for block in run.layout.blocks[:-1]:
        run.forward(block.index, BATCH)


def test_a_policy_is_for_layers_only_and_needs_a_store_if_it_swaps() -> None:
    for block in (BlockIndex(0), BlockIndex(4)):
        with pytest.raises(ValueError, match=f"given for block {block}; only layers have a choice, blocks 1 to 3"):
            run_of({block: KEPT})
    with pytest.raises(ValueError, match="block 2 are to be swapped, and there is no store"):
        run_of({BlockIndex(2): INPUT_AWAY})


def test_a_block_that_recomputes_nothing_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    layer = ModelForward.layer

    def noting(self: ModelForward, block: BlockIndex, hidden: torch.Tensor, calls: list) -> torch.Tensor:  # type: ignore[type-arg]
        computed.append(block)
        return layer(self, block, hidden, calls)

    monkeypatch.setattr(ModelForward, "layer", noting)
    run = run_of({BlockIndex(2): KEPT})
    run.step(BATCH, TARGETS)
    assert computed == [1, 1, 2, 2, 3, 3, 3, 3, 1, 1]


def test_fewer_held_outputs_mean_more_recompute() -> None:
    num_flops = []
    for policy in (
        BlockActivations(),
        BlockActivations(kept=frozenset({"nothing"})),
        BlockActivations(kept=frozenset({"aten.addmm.default"})),
        BlockActivations(kept=ALL),
        KEPT,
    ):
        run = run_of(dict.fromkeys(LAYERS, policy))
        forward_all(run)
        run.head(TARGETS)
        with FlopCounterMode(display=False) as counter:
            run.backward(BlockIndex(3), BATCH)
        num_flops.append(counter.get_total_flops())
    everything, needed, projections_kept, all_kept, graph_kept = num_flops
    assert everything > needed > projections_kept > all_kept
    assert all_kept == graph_kept


def test_next_activations_are_prefetched_while_a_block_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    run = run_of(dict.fromkeys(LAYERS, INPUT_AWAY), store)
    forward_all(run)
    assert store.events == [("put", i) for i in range(6)]  # block after block, one of each micro-batch
    store.events.clear()
    run.head(TARGETS)
    assert store.events == [("prefetch", 4)]
    for block in reversed(LAYERS):
        run.backward(block, BATCH)
    order = [4, 5, 2, 3, 0, 1]
    expected = [("prefetch", order[0])]
    for now, after in zip(order, [*order[1:], None], strict=True):
        expected += [("prefetch", after)] if after is not None else []
        expected.append(("get", now))
    assert store.events == expected


def test_graph_prefetches_latest_activations_first() -> None:
    store = MemoryStore()
    run = run_of({BlockIndex(3): ALL_AWAY}, store)
    forward_all(run)
    num_puts = len(store.events)
    run.head(TARGETS)
    prefetched = [index for event, index in store.events if event == "prefetch"]
    assert prefetched == list(reversed(range(len(prefetched))))
    assert 0 < len(prefetched) < num_puts  # of the first micro-batch only


def test_swapped_inputs_are_not_on_the_device() -> None:
    for policy, is_gone in ((INPUT_AWAY, True), (ALL_AWAY, True), (BlockActivations(), False), (KEPT, False)):
        run = run_of(dict.fromkeys(LAYERS, policy), MemoryStore())
        run.forward(BlockIndex(0), BATCH)
        run.forward(BlockIndex(1), BATCH)
        refs = [storage_ref(hidden) for hidden in run.runner.inputs[-1]]
        run.forward(BlockIndex(2), BATCH)
        assert [ref.expired() for ref in refs] == [is_gone] * len(BATCH)


def test_bytes_leave_the_device_and_come_back() -> None:
    store = MemoryStore()
    run = run_of(dict.fromkeys(LAYERS, ALL_AWAY), store)
    forward_all(run)
    hidden_nbytes = 4 * 32 * sum(ids.numel() for ids in BATCH)
    counts = store.counts
    assert counts.out_nbytes == counts.held_nbytes > 3 * 10 * hidden_nbytes
    run.head(TARGETS)
    for block in reversed(run.layout.blocks[:-1]):
        run.backward(block.index, BATCH)
    counts = store.counts
    assert counts.in_nbytes == counts.out_nbytes == counts.peak_held_nbytes
    assert counts.held_nbytes == 0


def test_a_layer_with_an_autograd_function_is_known_after_its_first_microbatch() -> None:
    model = make_model(ARCHITECTURES["Bloom"].config(tied=False, dropout=0.1))
    store = MemoryStore()
    policy = BlockActivations(swapped=frozenset({"aten.addmm.default"}))
    run = Run(model, activations={BlockIndex(1): policy}, store=store)
    held = []
    for _ in range(2):
        run.forward(BlockIndex(0), BATCH)
        num_puts = len(store.events)
        run.forward(BlockIndex(1), BATCH)
        held.append((len(store.held), [event for event, _ in store.events[num_puts:]].count("drop")))
    (num_first, num_dropped), (num_second, none_dropped) = held
    assert 2 * num_first == num_second
    assert num_dropped == num_first > none_dropped == 0


def test_evaluation_holds_nothing() -> None:
    store = MemoryStore()
    run = run_of(dict.fromkeys(LAYERS, ALL_AWAY), store)
    for block in run.layout.blocks[:-1]:
        run.forward(block.index, BATCH, keep=False)
    assert store.events == []
    assert [hidden.grad_fn for hidden in run.runner.inputs[-1]] == [None, None]


def test_a_step_that_is_given_up_leaves_nothing_in_the_store() -> None:
    store = MemoryStore()
    run = run_of(dict.fromkeys(LAYERS, ALL_AWAY), store)
    forward_all(run)
    assert store.counts.held_nbytes > 0
    run.forward(BlockIndex(0), BATCH)
    assert store.counts.held_nbytes == 0


def test_random_numbers_are_seeded_without_stack_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` records a stack trace for each missing kind of device.

    That takes longer than a small layer.
    """
    num_traces = []
    monkeypatch.setattr(traceback, "format_stack", lambda *_: num_traces.append(1) or [])
    run = run_of({})
    num_traces.clear()
    run.step(BATCH, TARGETS)
    assert num_traces == []
