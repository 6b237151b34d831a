"""Runs DeepSpeed on the same GPU with the same memory limit: ZeRO-Offload and ZeRO-Infinity, in their own processes."""

import importlib.util
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_check.cases import SHAPES, SpeedCase, States
from benchmarks.gpu_check.speed import SpeedRun
from benchmarks.peers.contenders import Contender, ContenderFailedError, ContenderRun, run_contender, without_paths
from benchmarks.peers.schedules import System
from benchmarks.peers.workload import Workload
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import GIB, ratio, spread, table

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
_RUN_LIMIT_S = 180.0  # timeout of a peer's run
_EXPECTED_S = 60.0  # until a peer's first step, with writing its model's weights
_WANTED_S = 120.0  # for a whole run


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One configuration of DeepSpeed, and the windlass cases that it is compared with."""

    key: str
    title: str
    device: str  # memory of params and states
    states: States  # of the compared windlass case
    system: System  # schedule that windlass imitates


PEERS = (
    Peer(
        key="zero_infinity",
        title="DeepSpeed ZeRO-Infinity, NVMe",
        device="nvme",
        states=States.SSD,
        system=System.ZERO_INFINITY,
    ),
    Peer(
        key="zero_offload",
        title="DeepSpeed ZeRO-Offload, stage 3, CPU",
        device="cpu",
        states=States.HOST,
        system=System.ZERO_OFFLOAD,
    ),
)


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The result of a peer."""

    peer: Peer
    run: ContenderRun

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the median step; None if the peer is missing."""
        step_s = self.run.step_s
        return WORKLOAD.batch_size * WORKLOAD.sequence_length / median(step_s) if step_s else None


def wanted_s() -> float:
    """Returns the seconds that the peers need, or 0 if DeepSpeed is not installed."""
    return 0.0 if _is_missing() else 2 * _WANTED_S


def _is_missing() -> bool:
    return importlib.util.find_spec("deepspeed") is None


def measure(root: Path, *, gpu_nbytes: int, until_s: float) -> Iterator[PeerRun]:
    """Runs each installed peer below `root`."""
    folder = root / "peers"
    for peer in PEERS:
        if _is_missing():
            yield PeerRun(peer, ContenderRun(missing="DeepSpeed is not installed"))
            continue
        left_s = until_s - time.monotonic()
        if left_s < _EXPECTED_S:
            yield PeerRun(peer, ContenderRun(missing=f"no time: {max(0.0, left_s):.0f} s are left"))
            continue
        try:
            if not folder.exists():
                WORKLOAD.write(folder)
            contender = Contender(
                name=peer.key,
                title=peer.title,
                module="benchmarks.peers.deepspeed_runner",
                arguments=(peer.device, str(folder), f"{gpu_nbytes / GIB:g}"),
                on_gpu=True,
                deadline_s=min(_RUN_LIMIT_S, until_s - time.monotonic()),
            )
            yield PeerRun(peer, run_contender(contender, WORKLOAD, folder))
        except (ContenderFailedError, OSError, subprocess.SubprocessError) as error:
            yield PeerRun(peer, ContenderRun(missing=without_paths(str(error))))


def tables(runs: Sequence[PeerRun]) -> list[str]:
    """Returns the table as lines of Markdown."""
    rows = [
        (
            each.peer.title,
            each.run.missing or spread(each.run.step_s),
            "" if each.tokens_per_s is None else f"{each.tokens_per_s:.0f}",
            f"{each.run.run_peak_nbytes / GIB:.2f}" if each.run.step_s else "",
        )
        for each in runs
    ]
    what = f"1.5B, batch {WORKLOAD.batch_size} in {WORKLOAD.num_microbatches} micro-batches"
    return table((what, "step, s", "tokens/s", "host peak (PSS), GiB"), rows)


def keys(runs: Sequence[PeerRun], speeds: Sequence[SpeedRun], cases: Sequence[SpeedCase]) -> dict[str, Any]:
    """Returns windlass's speed over each peer's, and over that of its own imitation; null if one is missing."""
    ratios: dict[str, Any] = {}
    tokens_per_s = {run.case.name: run.tokens_per_s for run in speeds}
    for peer in PEERS:
        ours, imitation = (
            next(
                (
                    tokens_per_s.get(case.name)
                    for case in cases
                    if (case.model, case.states, case.batch_size, case.system) == ("1.5B", peer.states, 16, system)
                ),
                None,
            )
            for system in (None, peer.system)
        )
        theirs = next((each.tokens_per_s for each in runs if each.peer is peer), None)
        ratios[f"over_deepspeed_{peer.key}"] = ratio(ours, theirs)
        ratios[f"over_{peer.key}_schedule"] = ratio(ours, imitation)
    return ratios
