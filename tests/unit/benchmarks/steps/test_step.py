"""The conclusions of `benchmarks.step` and `benchmarks.memory` from their measurements."""

from pathlib import Path

import pytest

from benchmarks.memory.benchmark import growth_share
from benchmarks.peers.contenders import ContenderRun
from benchmarks.peers.deepspeed_runner import deepspeed_config
from benchmarks.peers.windlass_runner import placement_of
from benchmarks.step import SizeResults, contenders, full_plan, loss_difference, quick_plan, ratios_of

KEYS = (
    "step_over_plain",
    "step_over_limit",
    "step_over_deepspeed_cpu",
    "step_over_deepspeed_nvme",
    "peak_over_deepspeed_nvme",
    "control_share",
    "moving_share",
    "loss_difference",
)


def results(**runs: list[ContenderRun]) -> SizeResults:
    found = SizeResults()
    found.runs.update(runs)
    found.mix_bytes_per_s["slow"] = [50.0, 60.0]
    found.mix_bytes_per_s["fast"] = [90.0, 100.0, 110.0]
    return found


OURS = ContenderRun(
    step_s=(3.0, 4.0, 5.0), losses=(9.0, 8.0), steps_peak_nbytes=50, ssd_nbytes=(300, 200), control_s=0.4, moving_s=0.8
)
PLAIN = ContenderRun(step_s=(2.0, 2.0), losses=(9.0, 8.08), steps_peak_nbytes=70)
NVME = ContenderRun(step_s=(8.0,), losses=(9.0, 8.0), steps_peak_nbytes=200)


def test_ratios_are_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.step.num_cores", lambda: 2)
    ratios = ratios_of(results(ssd=[OURS], plain=[PLAIN], deepspeed_nvme=[NVME]), "ssd")
    assert set(ratios) == set(KEYS)
    assert ratios["step_over_plain"] == 2.0
    # 500 bytes at 100 bytes a second take longer than plain PyTorch's step.
    assert ratios["step_over_limit"] == 4.0 / 5.0
    assert ratios["step_over_deepspeed_nvme"] == 0.5
    assert ratios["peak_over_deepspeed_nvme"] == 0.25
    assert ratios["control_share"] == pytest.approx(0.4 / (4.0 * 2))
    assert ratios["moving_share"] == pytest.approx(0.8 / (4.0 * 2))
    assert ratios["loss_difference"] == pytest.approx(0.08 / 8.08)
    assert ratios["step_over_deepspeed_cpu"] is None


def test_the_limit_is_plain_pytorch_where_the_ssds_are_faster() -> None:
    found = results(ssd=[OURS], plain=[PLAIN])
    found.mix_bytes_per_s["fast"] = [1000.0]
    assert ratios_of(found, "ssd")["step_over_limit"] == 2.0


def test_a_missing_peer_gives_null_and_never_a_guess() -> None:
    absent = ContenderRun(missing="not installed")
    ratios = ratios_of(results(ssd=[OURS], plain=[absent], deepspeed_cpu=[absent], deepspeed_nvme=[absent]), "ssd")
    assert {key for key, value in ratios.items() if value is not None} == {"control_share", "moving_share"}


@pytest.mark.parametrize(("name", "tier"), [("host", "host_blocks"), ("plan", "device_blocks")])
def test_windlass_runs_with_its_states_on_every_tier(name: str, tier: str) -> None:
    found = {contender.name: contender for contender in contenders(Path("ssd"))}
    *ssd_dirs, place, word = found[name].arguments
    assert (tuple(ssd_dirs), place) == (found["ssd"].arguments, "--place")
    placement = placement_of([word], num_blocks=5)
    blocks = {"host_blocks": placement.host_blocks, "device_blocks": placement.device_blocks}
    assert blocks.pop(tier) == tuple(range(5))
    assert set(blocks.values()) == {()}
    assert found[name].shm_pattern == found["ssd"].shm_pattern


def test_losses_are_compared_step_by_step() -> None:
    assert loss_difference([PLAIN, OURS], [PLAIN]) == pytest.approx(0.08 / 8.08)
    assert loss_difference([OURS], []) is None
    with pytest.raises(ValueError, match="zip"):
        loss_difference([ContenderRun(losses=(9.0,))], [PLAIN])


def test_the_sizes_are_those_that_results_are_quoted_for() -> None:
    shapes = [workload.shape for workload in full_plan(2).workloads.values()]
    assert [(shape.hidden, shape.num_layers, shape.vocab) for shape in shapes] == [(1024, 12, 8192), (2048, 12, 8192)]
    assert round(shapes[0].num_params / 1e6) == 171
    assert [(w.batch_size, w.sequence_length) for w in full_plan(2).workloads.values()] == [(4, 256), (1, 256)]


def test_growth_share_is_of_the_model_states() -> None:
    peaks = {8: [1000, 1002, 998], 32: [1700, 1702, 1600]}
    assert growth_share(peaks, {8: 100, 32: 600}) == pytest.approx(700 / (14 * 500))


def test_deepspeed_swaps_only_what_the_peer_is_named_for() -> None:
    workload = quick_plan(2).workloads["quick"]
    cpu, nvme = (deepspeed_config(workload, device, Path("ssd"))["zero_optimization"] for device in ("cpu", "nvme"))
    assert cpu["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert cpu["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert nvme["offload_param"]["nvme_path"] == nvme["offload_optimizer"]["nvme_path"] == "ssd"
    # Every tensor must fit into a buffer.
    shape = workload.shape
    assert nvme["offload_param"]["buffer_size"] >= max(shape.vocab, shape.intermediate) * shape.hidden


def test_deepspeed_reads_all_settings_of_its_io() -> None:
    """DeepSpeed ignores names that it does not know."""
    names = deepspeed_config(quick_plan(2).workloads["quick"], "nvme", Path("ssd"))["aio"].keys()
    known = {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"}
    assert names <= known
