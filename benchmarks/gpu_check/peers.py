"""Runs DeepSpeed on the same GPU with the same memory limit: ZeRO-3, with all states in host memory or on the SSD.

Each run is a process of its own. On a CPU, in the tiny form, DeepSpeed computes on the CPU.
"""

import importlib.util
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from benchmarks.gpu_check.case import NotHereError, Setting
from benchmarks.gpu_check.cases import CAP_NBYTES, SHAPES, TINY, PeerCase, States
from benchmarks.peers.contenders import Contender, ContenderFailedError, run_contender
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
TINY_WORKLOAD = replace(WORKLOAD, shape=TINY, sequence_length=32)
_DEADLINE_S = 400.0


def measure(case: PeerCase, setting: Setting) -> dict[str, Any]:
    """Trains the workload with DeepSpeed. Raises NotHereError where it is not installed, or fails."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotHereError("DeepSpeed is not installed")
    workload, is_gpu = TINY_WORKLOAD if setting.is_tiny else WORKLOAD, setting.device == "cuda"
    folder = setting.root / "peers"
    if not folder.exists():
        workload.write(folder)
    device = "nvme" if case.states is States.SSD else "cpu"
    contender = Contender(
        name=case.schedule,
        title=case.name,
        module="benchmarks.peers.deepspeed_runner",
        arguments=(device, str(folder), *([f"{CAP_NBYTES / GIB:g}"] if is_gpu else [])),
        on_gpu=is_gpu,
        deadline_s=_DEADLINE_S,
    )
    try:
        run = run_contender(contender, workload, folder)
    except ContenderFailedError as error:  # no failure of windlass
        raise NotHereError(str(error)) from None
    if run.missing is not None:
        raise NotHereError(run.missing)
    tokens_per_s = workload.batch_size * workload.sequence_length / median(run.step_s)
    return {**asdict(run), "tokens_per_s": tokens_per_s}
