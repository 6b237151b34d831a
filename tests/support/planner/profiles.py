"""Small profiles and machines for tests of the planner."""

from dataclasses import replace
from typing import Any

from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.cost.model_profile import BlockProfile, LayerProfile, ModelProfile, OperatorProfile, shared_of
from windlass.planner.cost.rates import Speeds
from windlass.planner.solver.planned_job import Limits, PlannedJob

MIB = 2**20
PLENTY = Limits(device_nbytes=1e12, host_nbytes=1e12, ssd_nbytes=1e12)


def limits(device_mib: float, host_mib: float, ssd_mib: float = 1e6) -> Limits:
    return Limits(device_nbytes=device_mib * MIB, host_nbytes=host_mib * MIB, ssd_nbytes=ssd_mib * MIB)


def operator(
    name: str, nbytes: int, num_flops: int, reads: tuple[int, ...], *, is_saved: bool = True
) -> OperatorProfile:
    return OperatorProfile(name=name, outputs_nbytes=(nbytes,), num_flops=num_flops, is_saved=is_saved, reads=reads)


def make_profile(num_layers: int, *, scale: int = 1 << 20, is_tied: bool = False) -> ModelProfile:
    """A model of layers with 8 x `scale` parameters, whose operators put out some MiB.

    Its two matrix products save different numbers of FLOP per byte.
    """
    layer = LayerProfile(
        numel=8 * scale,
        num_flops=100 * 10**9,
        peak_nbytes=12 << 20,
        input_nbytes=2 << 20,
        largest_param_numel=4 * scale,
        operators=(
            operator("norm#0", 2 << 20, 0, ()),
            operator("mm#0", 6 << 20, 50 * 10**9, (0,)),
            operator("act#0", 6 << 20, 0, (1,)),
            operator("mm#1", 2 << 20, 50 * 10**9, (2,), is_saved=False),
        ),
    )
    return ModelProfile(
        name="small",
        num_examples=1,
        num_tokens=128,
        embedding=BlockProfile(numel=4 * scale, num_flops=0, peak_nbytes=2 << 20),
        layers=(layer,) * num_layers,
        head=BlockProfile(numel=4 * scale, num_flops=20 * 10**9, peak_nbytes=8 << 20),
        shared=shared_of(num_layers, is_tied=is_tied),
        chunk_numel=scale,
    )


def make_job(num_layers: int = 6, *, num_microbatches: int = 1, keeps_grads: bool = False, **kwargs: int) -> PlannedJob:
    """A job in bf16 with fp32 states."""
    return PlannedJob(
        model=make_profile(num_layers, **kwargs),
        training=TrainingConfig(
            batch_size=num_microbatches,
            num_microbatches=num_microbatches,
            sequence_length=128,
            clip_norm=None,
            update_order=UpdateOrder.KEPT if keeps_grads else UpdateOrder.ACTIVE,
            total_steps=1,
        ),
    )


def with_cuts(job: PlannedJob, *cuts: int) -> PlannedJob:
    """The job with parts of matrices to choose from. With smaller parts, an operation needs less memory."""

    def with_cut(model: ModelProfile, cut: int) -> ModelProfile:
        less = [replace(layer, peak_nbytes=(8 << 20) + 2 * min(cut, 2 << 20)) for layer in model.layers[:1]]
        return replace(model, layers=(*less,) * len(model.layers))

    return replace(job, cuts=cuts, with_cut=with_cut)


def make_speeds(**changes: float) -> Speeds:
    """A machine on which all parts of a step take about as long."""
    rates: dict[str, Any] = {
        "num_ssds": 1,
        "device_flops": 1e12,
        "device_memory_bytes": 1e15,
        "device_params": 1e10,
        "h2d_bytes": 1e9,
        "d2h_bytes": 1e9,
        "ssd_read_bytes": 2e9,
        "ssd_write_bytes": 1e9,
        "optimizer_params": 1e8,
    }
    return Speeds(**{**rates, **changes})
