"""Runs DeepSpeed on the same GPU with the same memory limit: ZeRO-Offload and ZeRO-Infinity, in their own processes."""

import importlib.util
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.gpu_check.case import NotHereError, Setting
from benchmarks.gpu_check.cases import CAP_NBYTES, SHAPES, PeerCase, States
from benchmarks.peers.contenders import Contender, run_contender
from benchmarks.peers.workload import Workload
from benchmarks.reporting.machine import num_cores
from windlass.amounts import GIB

# With fp32 logits of all tokens at once, no larger micro-batch fits beside the other tensors.
WORKLOAD = Workload(
    shape=SHAPES["1.5B"],
    batch_size=16,
    sequence_length=1024,
    num_warmup_steps=1,
    num_timed_steps=2,
    num_threads=num_cores(),
    seed=1,
    num_microbatches=4,
)
_DEADLINE_S = 400.0


def measure(case: PeerCase, setting: Setting) -> dict[str, Any]:
    """Trains the workload with DeepSpeed. Raises NotHereError where it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotHereError("DeepSpeed is not installed")
    if setting.is_tiny:
        raise NotHereError("DeepSpeed has no tiny form")
    folder = setting.root / "peers"
    if not folder.exists():
        WORKLOAD.write(folder)
    device = "nvme" if case.states is States.SSD else "cpu"
    contender = Contender(
        name=case.schedule,
        title=case.name,
        module="benchmarks.peers.deepspeed_runner",
        arguments=(device, str(folder), f"{CAP_NBYTES / GIB:g}"),
        on_gpu=True,
        deadline_s=_DEADLINE_S,
    )
    run = run_contender(contender, WORKLOAD, folder)
    if run.missing is not None:
        raise NotHereError(run.missing)
    tokens_per_s = WORKLOAD.batch_size * WORKLOAD.sequence_length / median(run.step_s)
    return {**asdict(run), "tokens_per_s": tokens_per_s}
