"""The ratios of the optimizer's benchmark, and that its contenders do the same work."""

import pytest
import torch

from benchmarks.optimizer.benchmark import Plan as OptimizerPlan
from benchmarks.optimizer.benchmark import measure, name_of, ratios_of, rows_of
from benchmarks.optimizer.contenders import LEARNING_RATE, Contender, copies, memory_of, torch_fused
from windlass.storage.ids import StatePrecision


def contender(name: str, nbytes: int) -> Contender:
    return Contender(name=name, nbytes=nbytes, prepare=lambda: None, run=lambda: None)


def results(deepspeed_s: float | None) -> tuple[list[Contender], dict[str, list[float]]]:
    """Three rounds: all contenders take twice as long in the second, and windlass three times in the last."""
    seconds = {name_of(states): [2.0, 4.0, 6.0] for states in StatePrecision}
    seconds |= {"memcpy, one": [1.0, 2.0, 1.0], "memcpy, two": [4.0, 8.0, 4.0]}
    sizes = dict.fromkeys(seconds, 100) | {name_of(StatePrecision.SPLIT): 80, name_of(StatePrecision.BF16): 50}
    found = [contender(name, size) for name, size in sizes.items()]
    if deepspeed_s is not None:
        seconds["DeepSpeed CPUAdam and casts"] = [deepspeed_s, 2 * deepspeed_s, deepspeed_s]
        found.append(contender("DeepSpeed CPUAdam and casts", 100))
    return found, seconds


def test_ratios_are_medians_over_rounds_and_the_least_of_formats() -> None:
    ratios = ratios_of({"bf16": results(3.0), "fp32": results(5.0)})
    assert ratios == {"over_deepspeed_min": 1.5, "over_memcpy_min": 0.4, "bf16_over_memcpy": 0.25}


def test_a_missing_peer_makes_no_ratio() -> None:
    ratios = ratios_of({"bf16": results(None)})
    assert ratios["over_deepspeed_min"] is None
    assert ratios["over_memcpy_min"] == 0.4


def test_contenders_take_turns_and_are_measured_as_often() -> None:
    calls: list[str] = []
    both = [Contender(name=name, nbytes=8, prepare=lambda: None, run=lambda n=name: calls.append(n)) for name in "ab"]  # type: ignore[misc]
    times = measure(both, OptimizerPlan(numel=1, num_rounds=2, num_calls=1, grads=()))
    assert calls == ["a", "a", "b", "b", "b", "b", "a", "a"]  # each round has a warm-up call
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    assert [row[1] for row in rows_of("bf16", both, {"a": [1.0], "b": [2.0]}, 1)] == ["a", "b"]


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_peers_update_the_shared_memory(grad_dtype: torch.dtype) -> None:
    with memory_of(1000) as memory:
        peer = torch_fused(memory, grad_dtype)
        peer.prepare()
        master = memory.view("master", torch.float32)
        before = master.clone()
        peer.run()
        change = (master - before).abs()
        assert change.min() > 0
        assert change.max() < 20 * LEARNING_RATE
        assert torch.equal(memory.view("param", torch.bfloat16), master.to(torch.bfloat16))
        assert peer.nbytes == (grad_dtype.itemsize + 12 + 14) * 1000
        del master


def test_copies_move_what_they_say() -> None:
    with memory_of(1000) as memory:
        source, target = memory.halves()
        for number, copy in enumerate(copies(memory), start=1):
            source.fill_(number)
            copy.run()
            assert target.eq(number).all()
            assert copy.nbytes == 2 * source.numel()
        del source, target
