"""Times of a model's blocks on this device."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine.architectures import ARCHITECTURES
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.slices import slice_sizes
from windlass.planner.profiling import measure_model
from windlass.planner.profiling.block_times import LARGEST_ERROR, with_times
from windlass.planner.profiling.measure_model import measure_blocks
from windlass.planner.profiling.model_profiler import profile_config
from windlass.storage.ids import BlockIndex, Precision

QUICK = {("Qwen2", True), ("Mixtral", False)}


@pytest.mark.short("Qwen2-True")
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        pytest.param(name, tied, marks=[] if (name, tied) in QUICK else [pytest.mark.long])
        for name in ("Qwen2", "Mixtral", "GPT-2")
        for tied in (False, True)
    ],
)
def test_every_block_has_its_times(name: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_model, "MAX_S", 0.1)  # precision does not matter here
    config = ARCHITECTURES[name].config(tied=tied, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    measured = measure_blocks(profile, config, Precision.BF16, torch.device("cpu"))
    assert measured.standard_error >= 0
    timed = with_times(profile, measured.times)
    for block in timed.blocks[:-1]:
        assert block.forward_s is not None
        assert block.backward_s is not None
        assert block.forward_s > 0
        assert block.backward_s > 0
    assert timed.head.forward_s is not None
    assert timed.head.forward_s > 0
    assert timed.head.backward_s == 0
    again = timed.layers[0].again
    assert again is not None
    assert min(again.all_s, again.one_held_s, again.most_held_s) >= 0
    assert timed.layers[0] == timed.layers[-1]  # measured once
    assert timed.numel == profile.numel


@pytest.mark.long
def test_one_time_work_of_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the first use of a kernel loads it, which took longer than half of the time for all rounds."""
    monkeypatch.setattr(measure_model, "_STANDARD_ERROR", 10.0)  # three rounds are enough
    monkeypatch.setattr(measure_model, "MAX_S", 60.0)
    whole_round, taken_s = measure_model.BlockBench.round, []

    def first_takes_long(bench: measure_model.BlockBench) -> Any:
        times = whole_round(bench)
        taken_s.append(1000.0 if not taken_s else 0.0)
        return [{block: (a + taken_s[-1], b + taken_s[-1]) for block, (a, b) in each.items()} for each in times]

    monkeypatch.setattr(measure_model.BlockBench, "round", first_takes_long)
    config = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    measured = measure_blocks(profile, config, Precision.BF16, torch.device("cpu"))
    assert len(taken_s) == 4
    assert max(times.forward_s for times in measured.times.values()) < 100


class SlowPasses:
    """Stands in for the clock and the passes of a bench, which take the given seconds in turn; the last ones remain."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self.taken_s = list(seconds), list[float]()

    def perf_counter(self) -> float:
        return sum(self.taken_s)

    def next(self, bench: measure_model.BlockBench, choices: Any) -> Any:
        pass_s = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        self.taken_s.append(pass_s)
        return dict.fromkeys([0, *choices, bench._partition.head], (pass_s, pass_s))


@pytest.mark.parametrize(
    ("seconds", "num_passes", "is_disturbed"),
    [
        ([3.0], 9, False),  # a pass, and two rounds with four choices, which agree
        ([3.0] * 5 + [1.2], 13, False),  # a third round, because the first was disturbed
        ([3.0] * 5 + [2.0] * 4 + [1.2], 13, True),  # the second one, too
        ([21.0], 2, False),
        ([63.0, 25.0], 2, True),
        ([241.0], 1, True),  # a second one would take too long
    ],
)
def test_slow_passes_are_measured_twice_to_know_their_error(
    seconds: list[float], num_passes: int, is_disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine is slow. So one round alone was stored for good, with no error."""
    slow = SlowPasses(*seconds)
    monkeypatch.setattr(measure_model, "time", slow)
    monkeypatch.setattr(measure_model.BlockBench, "_pass", lambda bench, choices: slow.next(bench, choices))
    config = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    measured = measure_blocks(profile, config, Precision.BF16, torch.device("cpu"))
    assert len(slow.taken_s) == num_passes
    assert (measured.standard_error > LARGEST_ERROR) == is_disturbed


def test_measurement_says_how_much_other_work_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_model, "LONG_S", 0.0)
    monkeypatch.setattr(measure_model, "OtherWork", lambda: SimpleNamespace(share=lambda: 0.6))
    config = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    assert measure_blocks(profile, config, Precision.BF16, torch.device("cpu")).others == 0.6


def test_slow_block_is_measured_with_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_model, "LONG_S", 0.0)
    config = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    measured = measure_blocks(profile, config, Precision.BF16, torch.device("cpu"))
    timed = with_times(profile, measured.times)
    assert all(layer.forward_s and layer.again is None for layer in timed.layers)


@pytest.mark.short("True-64-expected2")
@pytest.mark.parametrize(
    ("tied", "slice_tokens", "expected"), [(False, 64, []), (False, 16, ["head"]), (True, 64, ["embedding"])]
)
def test_gradients_are_summed_and_converted_as_in_a_job(
    tied: bool, slice_tokens: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_model, "LONG_S", 0.0)  # two passes
    monkeypatch.setattr(slice_sizes, "MIN_SLICE_TOKENS", slice_tokens)
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", slice_tokens)
    config = ARCHITECTURES["Qwen2"].config(tied=tied, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    install, norm = BlockRunner.install, measure_model.squared_norm
    in_fp32: set[int] = set()
    normed: list[torch.dtype] = []

    def note_install(runner: BlockRunner, block: BlockIndex, flats: Any, grads: Any) -> None:
        in_fp32.update(each for each, grad in grads.items() if grad.flat.dtype is torch.float32)
        install(runner, block, flats, grads)

    def note_norm(grad: torch.Tensor) -> torch.Tensor:
        normed.append(grad.dtype)
        return norm(grad)

    monkeypatch.setattr(BlockRunner, "install", note_install)
    monkeypatch.setattr(measure_model, "squared_norm", note_norm)
    measure_blocks(profile, config, Precision.BF16, torch.device("cpu"))
    blocks = {"embedding": 0, "head": len(profile.layers) + 1}
    assert in_fp32 == {blocks[name] for name in expected}
    assert set(normed) == {torch.bfloat16}  # of hidden states, and of gradients as they leave the device


@pytest.mark.long
def test_norms_of_several_lanes_are_measured_apart_from_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_model, "LONG_S", 0.0)  # two passes
    config = ARCHITECTURES["Llama"].config(tied=False, dropout=0.0)
    profile = profile_config(config, Precision.BF16, num_examples=2, num_tokens=16)
    norm, norms = measure_model.squared_norm, measure_model.portable_squared_norms
    normed: list[torch.dtype] = []
    pieces: dict[int, set[int]] = {}

    def note_norm(values: torch.Tensor) -> torch.Tensor:
        normed.append(values.dtype)
        return norm(values)

    def note_norms(grad: torch.Tensor, piece_numel: int) -> list[torch.Tensor]:
        pieces.setdefault(grad.numel(), set()).add(piece_numel)
        time.sleep(0.01)
        return norms(grad, piece_numel)

    monkeypatch.setattr(measure_model, "squared_norm", note_norm)
    monkeypatch.setattr(measure_model, "portable_squared_norms", note_norms)
    found = measure_blocks(
        profile,
        config,
        Precision.BF16,
        torch.device("cpu"),
        sums_grads=True,
        has_lanes=True,
        grad_precision=Precision.FP32,
    ).times
    assert set(normed) == {torch.bfloat16}  # of hidden states only: gradients are fp32
    assert pieces == {block.numel: {profile.chunk_numel} for block in profile.blocks}
    assert all(times.norms_s is not None and times.norms_s >= 0.01 for times in found.values())
    assert [block.norms_s for block in with_times(profile, found).blocks] == [
        times.norms_s for _, times in sorted(found.items())
    ]
    plain = measure_blocks(profile, config, Precision.BF16, torch.device("cpu"), sums_grads=True).times
    assert {times.norms_s for times in plain.values()} == {None}
