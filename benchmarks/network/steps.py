"""Measures steps of a real job over two boxes, beside the formula of plans and the simulator.

Each box is a process in a network namespace. Compute is held back to a declared speed, so that two boxes can share one
small machine. The rate of the network is that of the link, measured in the same run. Nothing is fitted.
"""

import json
import math
import pickle
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import trustme

from benchmarks.network.contenders import CONTENDERS, LINK, Rig
from benchmarks.network.stage_box import StageJob
from benchmarks.peers.windlass_runner import job_spec
from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.simulator.cases import compute_seconds
from windlass.actors.job import JOURNAL_FILE, JobContext, JobSpec, SsdFacts, make_context, read_journal
from windlass.actors.job.journal import METRICS
from windlass.actors.messages import Phase
from windlass.actors.runtime.boxes import LinkConfig
from windlass.actors.worker_policy import Stage
from windlass.engine.memory_plan import Placement
from windlass.engine.model import Partition, build_meta_model, load_config
from windlass.planner.simulation import NetworkRates, SimulatedBox, simulated_step_s_of_boxes
from windlass.planner.simulation.simulate import Rates, Work
from windlass.planner.stages.pipeline import Pipeline, StageTimes
from windlass.storage.ids import BoxName, Kernel, Precision
from windlass.storage.io import DEFAULT_IO
from windlass.storage.link import SECRET_NBYTES, Certificates, LinkSettings, server_name

_NUM_LAYERS, _HIDDEN, _LENGTH, _EXAMPLES, _NUM_GROUPS = 4, 256, 128, 8, 6  # examples of a micro-batch
_NUM_STEPS = 6
# The first step begins with no step before it, and the last one has none after it.
_INNER = slice(1, _NUM_STEPS - 1)
_PORTS = (7500, 7501)
_TIMEOUT_S = 240.0
_SSDS = (SsdFacts(io=DEFAULT_IO, weight=1),)
_CHUNK_NUMEL = 1 << 17
_MIB = 1 << 20
_SILENCE_S = 60.0  # of a box that a busy machine does not run


class JobFailedError(Exception):
    """The job did not end with a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A limit of the boxes' rate, and the declared forward time of a layer for a micro-batch."""

    name: str
    bits_per_s: float
    layer_s: float
    nbytes: int  # with which the rate of the link is measured


# Hidden states of a micro-batch are 1 MiB: 9 ms at 1 Gbit/s, 350 ms at 25 Mbit/s.
CASES = (
    StepCase(name="1 Gbit/s, bound by compute", bits_per_s=1e9, layer_s=0.15, nbytes=64 * _MIB),
    StepCase(name="25 Mbit/s, bound by the network", bits_per_s=2.5e7, layer_s=0.05, nbytes=16 * _MIB),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """The step times of a case, in seconds."""

    case: StepCase
    network_bytes: float  # per second, that the link moved
    steps_s: Sequence[float]
    formula_s: float
    simulated_s: float

    @property
    def over_bound(self) -> float:
        """The mean step over that of the formula."""
        return statistics.fmean(self.steps_s) / self.formula_s

    @property
    def simulator_error(self) -> float:
        """The relative difference of the simulated step from the mean one."""
        return abs(self.simulated_s / statistics.fmean(self.steps_s) - 1)


def measure_steps(rig: Rig, case: StepCase) -> StepRun:
    """Runs a case. Raises JobFailedError, or Unavailable if the rate of the link cannot be measured."""
    rig.shape(case.bits_per_s)
    network_bytes = 1e9 * CONTENDERS[LINK](rig, case.nbytes).gb_per_s
    folder = rig.folder / f"steps-{case.bits_per_s:.0f}"
    specs = _specs(folder)
    partition = Partition(build_meta_model(load_config(specs[0].model_dir), Precision.FP32), _CHUNK_NUMEL)
    # Seconds to multiply one param with all tokens of a micro-batch.
    product_s = case.layer_s / partition.layout.blocks[1].decay_numel
    steps_s = _train(rig, folder, specs, products_per_s=_EXAMPLES * _LENGTH / product_s)
    contexts = tuple(make_context(spec, partition.layout, "", _SSDS) for spec in specs)
    return StepRun(
        case=case,
        network_bytes=network_bytes,
        steps_s=steps_s,
        formula_s=_formula_s(contexts, product_s, network_bytes),
        simulated_s=_simulated_s(contexts, product_s, network_bytes),
    )


def _specs(folder: Path) -> tuple[JobSpec, ...]:
    """Returns the job as each box sees it, in fp32 with states on an SSD. Writes its model and tokens."""
    workload = Workload(
        shape=ModelShape(
            hidden=_HIDDEN, num_layers=_NUM_LAYERS, vocab=128, intermediate=_HIDDEN, num_heads=4, is_tied=False
        ),
        batch_size=_EXAMPLES * _NUM_GROUPS,
        sequence_length=_LENGTH,
        num_warmup_steps=0,
        num_timed_steps=_NUM_STEPS,
        num_threads=1,
        seed=1,
    )
    workload.write_here(folder)
    middle, num_blocks = 1 + _NUM_LAYERS // 2, _NUM_LAYERS + 2
    specs = []
    for box in range(2):
        home = folder / f"box{box}"
        spec = job_spec(workload, folder, home / "job", [home / "ssd"])
        for name in (spec.job_dir, *spec.ssd_dirs):
            Path(name).mkdir(parents=True)
        spec = spec.with_training(
            num_microbatches=_NUM_GROUPS,
            clip_norm=None,
            precision=Precision.FP32,
            kernel=Kernel.FUSED,  # do not compile a kernel for updates this small
        )
        specs.append(
            replace(
                spec,
                stages=(Stage(0, middle), Stage(middle, num_blocks)),
                box=box,
                placement=Placement(group_size=1),
                kernel_dir=None,
                compute_threads=1,
                optimizer_threads=1,
            )
        )
    return tuple(specs)


def _train(rig: Rig, folder: Path, specs: tuple[JobSpec, ...], *, products_per_s: float) -> list[float]:
    """Runs the job on both boxes. Returns the times of its inner steps."""
    boxes, names = (rig.receiver, rig.sender), (BoxName("a"), BoxName("b"))
    addresses = {name: (box.address, port) for name, box, port in zip(names, boxes, _PORTS, strict=True)}
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    for name in names:
        certificate = authority.issue_cert(server_name(name))
        certificate.private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
    links = tuple(
        LinkConfig(
            names=names,
            address=addresses[name],
            addresses={other: address for other, address in addresses.items() if other != name},
            certificates=Certificates(certificate=folder / f"{name}.pem", authority=folder / "authority.pem"),
            secret=bytes(SECRET_NBYTES),
            settings=LinkSettings(silence_s=_SILENCE_S),
        )
        for name in names
    )
    file = folder / "job.pickle"
    file.write_bytes(pickle.dumps(StageJob(specs=specs, links=links, products_per_s=products_per_s)))
    module = Path(__file__).with_name("stage_box.py")
    first, other = boxes
    second = other.start(*_command(module, file, 1), log="stage.log", environment=rig.environment)
    try:
        done = first.run(*_command(module, file, 0), environment=rig.environment, timeout_s=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise JobFailedError(f"the job took more than {_TIMEOUT_S:.0f} s; leave the machine idle") from None
    finally:
        second.kill()
        second.wait()
    if done.returncode != 0:
        raise JobFailedError(f"the first box ended with {done.stderr.strip()[-500:]}")
    outcome = json.loads(done.stdout.splitlines()[-1])
    if outcome["status"] != "succeeded":
        raise JobFailedError(f"the job ended as {outcome['status']}: {outcome['error']}")
    records = read_journal(Path(specs[0].job_dir) / JOURNAL_FILE)
    return [record.data["timeline"]["period_s"] for record in records if record.kind == METRICS][_INNER]


def _command(module: Path, file: Path, box: int) -> list[str | Path]:
    return [sys.executable, "-W", "ignore", module, file, str(box)]


def _simulated_s(contexts: Sequence[JobContext], product_s: float, network_bytes: float) -> float:
    rates = Rates(
        h2d_bytes=math.inf,
        d2h_bytes=math.inf,
        ssd_read_bytes=(math.inf,),
        ssd_write_bytes=(math.inf,),
        optimizer_params=math.inf,
        device_params=math.inf,
        launches_ahead=False,
    )
    boxes = [
        SimulatedBox(
            context=context,
            rates=rates,
            work=Work(compute_s=compute_seconds(context, product_s), crossing_nbytes=_crossing_nbytes()),
        )
        for context in contexts
    ]
    return simulated_step_s_of_boxes(boxes, NetworkRates(card_bytes=(network_bytes,) * len(contexts)))


def _formula_s(contexts: Sequence[JobContext], product_s: float, network_bytes: float) -> float:
    """Returns the step by the formula of plans, in which nothing but compute and the network takes time."""
    stages = []
    for context in contexts:
        seconds, head = compute_seconds(context, product_s), len(context.layout.blocks) - 1
        phases = dict.fromkeys(range(head), (Phase.FORWARD, Phase.BACKWARD)) | {head: (Phase.HEAD,)}
        round_s = sum(seconds[phase, block] for block in range(*context.stage) for phase in phases[block])
        stages.append(
            StageTimes(
                round_s=round_s,
                computed_s=round_s,
                beside_updates_s=0.0,
                updates_s=0.0,
                first_update_s=0.0,
                alone_s=_NUM_GROUPS * round_s,
            )
        )
    network = (network_bytes,) * len(stages)
    return Pipeline(
        stages=tuple(stages), num_rounds=_NUM_GROUPS, crossing_nbytes=_crossing_nbytes(), network_bytes=network
    ).step_s


def _crossing_nbytes() -> int:
    return _EXAMPLES * _LENGTH * _HIDDEN * Precision.FP32.itemsize
