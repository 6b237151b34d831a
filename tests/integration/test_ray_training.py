"""Jobs on real Ray actors, in separate processes: they agree with plain PyTorch and end cleanly."""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pretend_gpus import pretend_gpus, process_of, visible_gpus
from tests.support.reference_loop import train_plainly
from tests.support.training import exported_params, journal_of, leftovers_of, losses_of, make_spec, metrics_of
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.boxes import LinkConfig
from windlass.actors.runtime.moving.division import MoveSpec
from windlass.amounts import GIB
from windlass.engine.memory_plan.activation_policy import ActivationChoice, BlockActivations
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.layout import BlockLayout, ModelLayout, ParamSlice
from windlass.service.installation.process_ids import find_process, wait_until_gone
from windlass.service.machine.ray_cluster import RayCluster
from windlass.storage.ids import Attempt, BlockIndex, Precision
from windlass.storage.ssd.volume import VOLUME_FILE

# Seconds, for every wait; only a hang takes that long.
DEADLINE_S = 150.0
LOSS_TOLERANCE = {Precision.FP32: 1e-5, Precision.BF16: 1e-3, Precision.FP16: 1e-3}

NUM_GPUS = 2

# Answers each input line with one line. It is a separate process because Ray reads its environment when imported.
DRIVER = """
import json, os, pickle, sys
from pathlib import Path
from windlass.service.machine.ray_cluster import RayCluster
RayCluster(Path(sys.argv[1])).connect()
import ray
from windlass.actors.runtime.boxes import start_box_runner, start_first_box_runner
from windlass.actors.runtime.moving import start_move_runner
from windlass.actors.runtime.ray_runner import cancel_runner, find_runner, start_runner

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    verb, *arguments = json.loads(line)
    answer = None
    if verb == "start":
        start_runner(pickle.loads(Path(arguments[0]).read_bytes()))
    elif verb == "start box":
        specs, box, config = pickle.loads(Path(arguments[0]).read_bytes())
        if box:
            start_box_runner(specs[box], config)
        else:
            start_first_box_runner(specs, config)
    elif verb == "start move":
        start_move_runner(*pickle.loads(Path(arguments[0]).read_bytes()))
    elif verb == "find":
        answer = find_runner(*arguments) is not None
    elif verb == "cancel":
        runner = find_runner(*arguments)
        cancel_runner(*arguments)
        ray.get(runner.cancel.remote())  # so that it has been told when this answers
    elif verb == "import path":
        answer = ray.get(ray.remote(num_cpus=0)(lambda: __import__("sys").path).remote())
    print(json.dumps(answer), file=answers, flush=True)
"""


class Driver:
    """A process that is connected to a home's Ray daemon and executes requests."""

    def __init__(self, home: Path, cwd: Path) -> None:
        command = [sys.executable, "-c", DRIVER, str(home)]
        self.process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, verb: str, *arguments: str | int) -> Any:
        """Sends one request and returns the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([verb, *arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the driver has ended"
        return json.loads(answer)

    def start(self, spec: JobSpec) -> None:
        """Launches a job."""
        path = Path(spec.job_dir, "spec")
        path.write_bytes(pickle.dumps(spec))
        self.ask("start", str(path))

    def start_box(self, specs: Sequence[JobSpec], box: int, config: LinkConfig) -> None:
        """Launches one box's part of a job."""
        path = Path(specs[box].job_dir, f"spec-of-box-{box}")
        path.write_bytes(pickle.dumps((specs, box, config)))
        self.ask("start box", str(path))

    def start_move(self, move: MoveSpec, config: LinkConfig) -> None:
        """Launches one box's part of a move of a job's states."""
        path = Path(move.any.job_dir, f"move-of-box-{move.box}")
        path.write_bytes(pickle.dumps((move, config)))
        self.ask("start move", str(path))

    def cancel(self, spec: JobSpec) -> None:
        """Cancels a job. The runner has the request when this returns."""
        self.ask("cancel", spec.job, spec.attempt)

    def await_end(self, spec: JobSpec) -> dict[str, Any]:
        """The outcome of a job, after its runner has ended."""
        wait_for(lambda: not self.ask("find", spec.job, spec.attempt), "the job", spec)
        records = journal_of(spec)
        assert [record.seq for record in records] == list(range(1, len(records) + 1))
        assert [record.kind for record in records].count("outcome") == 1
        assert records[-1].kind == "outcome"
        return records[-1].data

    def kill(self) -> None:
        """Ends the process as a crash would."""
        with self.process as process:
            process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def home(direct_home: Path) -> Iterator[Path]:
    """A home with a Ray daemon and two simulated GPUs. The daemons of other modules have none."""
    cluster = RayCluster(direct_home)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in pretend_gpus(NUM_GPUS).items():
            patch.setenv(name, value)
        cluster.ensure_running(num_cpus=2, num_gpus=NUM_GPUS)
    yield direct_home
    cluster.stop()


@pytest.fixture(scope="module")
def cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory that holds the bare names of our packages. Ray puts it first on its workers' import path."""
    cwd = tmp_path_factory.mktemp("cwd")
    (cwd / "storage").mkdir()
    for name in ("storage/__init__.py", "engine.py"):
        (cwd / name).write_text("raise ImportError('a bare name was imported from the working directory')\n")
    return cwd


@pytest.fixture(scope="module")
def driver(home: Path, cwd: Path) -> Iterator[Driver]:
    """One driver for most tests. It works in `cwd`."""
    driver = Driver(home, cwd)
    yield driver
    driver.kill()


def wait_for(done: Callable[[], bool], what: str, spec: JobSpec) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not done():
        told = [record.message for record in journal_of(spec)][-3:]
        assert time.monotonic() < until_s, f"{what} took longer than {DEADLINE_S:g} s; the journal ends with {told}"
        time.sleep(0.05)


def num_steps(spec: JobSpec) -> int:
    return len(metrics_of(spec, "train_loss"))


def processes_of(spec: JobSpec) -> dict[str, psutil.Process]:
    """The processes of a running job, recognized by the files that only they have open or mapped."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            held = {Path(each.path) for each in process.open_files()}
            held |= {Path(each.path) for each in process.memory_maps(grouped=True)}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if not any(spec.job in path.name and path.suffix == ".arena" for path in held):
            continue
        stores = [i for i, name in enumerate(spec.ssd_dirs) if any(path.parent == Path(name) for path in held)]
        if stores:
            found[f"ssd-{stores[0]}"] = process
        elif Path(spec.dataset_dir, "train.tokens") in held:
            found["gpu-0"] = process
        elif Path(spec.job_dir, "journal.jsonl") in held:
            found["runner"] = process
        else:
            found["optimizer-0"] = process
    return found


def test_the_working_directory_comes_first_on_the_workers_import_path(driver: Driver, cwd: Path) -> None:
    """Without this, the other tests would prove nothing about shadowed names."""
    path = driver.ask("import path")
    assert path.index(str(cwd)) < min(i for i, each in enumerate(path) if each.endswith("site-packages"))


EVERY_BLOCK = (0, 1, 2, 3, 4)
ACTIVATIONS = (
    *ActivationChoice.RECOMPUTE_SWAP_INPUT.of_layers(1),
    *ActivationChoice.KEEP.of_layers(1),
    BlockActivations(swap_input=True, swapped=frozenset({"aten.mm.default", "aten.addmm.default"})),
)


@pytest.mark.parametrize(
    ("precision", "num_microbatches", "placement"),
    [
        # Each precision once. The parity matrix checks all placements (tests/unit/actors/parity/test_parity_matrix.py).
        pytest.param(Precision.FP32, 1, Placement(), id="fp32", marks=pytest.mark.long),
        pytest.param(Precision.FP32, 4, Placement(host_blocks=(1,), device_blocks=(3,), commit_every=4), id="mixed"),
        pytest.param(
            *(Precision.BF16, 1, Placement(num_host_grad_blocks=1)), id="gradients on SSDs", marks=pytest.mark.long
        ),
        pytest.param(
            *(Precision.BF16, 4, Placement(host_blocks=EVERY_BLOCK)),
            id="states in host memory",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Precision.FP16,
            4,
            Placement(num_cached_params=1000, activations=ACTIVATIONS, host_activation_nbytes=64 << 20),
            id="params stay, activations are swapped",
            marks=pytest.mark.long,
        ),
    ],
)
def test_thirty_steps_agree_with_plain_pytorch(
    driver: Driver, tmp_path: Path, precision: Precision, num_microbatches: int, placement: Placement
) -> None:
    spec = make_spec(
        tmp_path,
        tied=num_microbatches == 4,
        precision=precision,
        num_microbatches=num_microbatches,
        clip_norm=0.5 if precision is Precision.BF16 else None,
        num_cpu_optimizers=2 if num_microbatches == 4 else 1,
        checkpoint_every=20,
        placement=placement,
    )
    driver.start(spec)
    outcome = driver.await_end(spec)
    assert outcome["status"] == "succeeded", outcome
    assert outcome["model_dir"] == spec.output_dir
    assert leftovers_of(spec) == []

    plain = train_plainly(spec)
    tolerance = LOSS_TOLERANCE[precision]
    assert losses_of(spec) == pytest.approx(plain.losses, rel=tolerance)
    assert metrics_of(spec, "valid_loss") == pytest.approx(plain.validation_losses, rel=tolerance)
    moved = metrics_of(spec, "activation_bytes_in").values()
    assert all(moved) if placement.activations else not any(moved)
    checkpoints = [record.data for record in journal_of(spec) if record.kind == "checkpoint"]
    assert [each["step_number"] for each in checkpoints] == [20, 30]
    assert all((Path(each["path"]) / "model.safetensors").is_file() for each in checkpoints)


@pytest.mark.long
def test_ray_job_cancelled_ends_its_processes_within_a_step(driver: Driver, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, total_steps=2000, checkpoint_every=1000)
    driver.start(spec)
    wait_for(lambda: num_steps(spec) >= 2, "the first steps", spec)
    processes = processes_of(spec)
    assert set(processes) == {"runner", "gpu-0", "optimizer-0", "ssd-0", "ssd-1"}
    assert len({process.pid for process in processes.values()}) == 5
    for name in ("runner", "ssd-0", "ssd-1"):
        libraries = {Path(each.path).name for each in processes[name].memory_maps()}
        assert not any(library.startswith("libtorch") for library in libraries), f"{name} has loaded torch"
    identities = [find_process(process.pid) for process in processes.values()]

    driver.cancel(spec)
    committed = num_steps(spec)
    outcome = driver.await_end(spec)
    assert outcome["status"] == "cancelled"
    assert outcome["error"] is None
    # The step whose update is being written, and the next one, whose forward pass has begun.
    assert committed <= len(losses_of(spec)) <= committed + 2
    assert not Path(spec.output_dir).exists()
    assert leftovers_of(spec) == []
    assert wait_until_gone([each for each in identities if each is not None], timeout_s=DEADLINE_S)


@pytest.mark.long
def test_two_jobs_at_once_have_a_gpu_each_that_only_their_workers_see(driver: Driver, tmp_path: Path) -> None:
    specs = [make_spec(tmp_path / name, total_steps=2000) for name in ("ftjob-one", "ftjob-two")]
    for spec in specs:
        driver.start(spec)
    for spec in specs:
        wait_for(lambda spec=spec: num_steps(spec) >= 1, "the first step", spec)  # type: ignore[misc]
    seen = [dict(visible_gpus(Path(spec.job_dir))) for spec in specs]
    for spec in specs:
        driver.cancel(spec)
    for spec in specs:
        assert driver.await_end(spec)["status"] == "cancelled"

    assert {each.pop("gpu-0") for each in seen} == {"0", "1"}
    assert seen == [{"optimizer-0": "", "ssd-0": "", "ssd-1": ""}] * 2


@pytest.mark.long
def test_cancelled_before_it_trains(driver: Driver, tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    driver.start(spec)
    driver.cancel(spec)
    assert driver.await_end(spec)["status"] == "cancelled"
    assert num_steps(spec) == 0
    assert leftovers_of(spec) == []


# The consequences of a killed ssd-0 are tested in test_ray_resume.py, too.
@pytest.mark.parametrize(
    "victim", ["gpu-0", *(pytest.param(each, marks=pytest.mark.long) for each in ("optimizer-0", "ssd-0"))]
)
def test_a_killed_process_interrupts_the_attempt_by_its_name(driver: Driver, tmp_path: Path, victim: str) -> None:
    # The timeout is longer than this test may take: waits on the dead process must end without it.
    spec = make_spec(tmp_path, total_steps=2000, deadline_s=600.0)
    driver.start(spec)
    wait_for(lambda: num_steps(spec) >= 2, "the first steps", spec)
    processes_of(spec)[victim].kill()
    outcome = driver.await_end(spec)
    assert outcome["status"] == "interrupted"
    assert outcome["error"]["code"] == "process_lost"
    assert f"the process of {victim} died" in outcome["error"]["message"]
    # The states stay for the next attempt; nothing else is left.
    left = leftovers_of(spec)
    for ssd_dir in spec.ssd_dirs:
        assert f"{spec.job} in {ssd_dir}/{VOLUME_FILE}" in left
    assert not any(path.startswith(spec.arena_dir) for path in left)


@pytest.mark.long
def test_two_gpus_have_the_bits_of_one(driver: Driver, tmp_path: Path) -> None:
    """Each has a process of its own, so dropout has the same random numbers whoever computes a micro-batch."""
    found = []
    for num_ranks in (1, 2):
        spec = make_spec(
            tmp_path / f"{num_ranks}",
            tied=True,
            dropout=0.1,
            precision=Precision.BF16,
            clip_norm=0.5,
            num_microbatches=4,
            lanes=2,
            num_ranks=num_ranks,
            placement=Placement(group_size=1),
            total_steps=6,
            evaluate_every=3,
        )
        driver.start(spec)
        assert driver.await_end(spec)["status"] == "succeeded"
        assert leftovers_of(spec) == []
        found.append([losses_of(spec), metrics_of(spec, "valid_loss"), metrics_of(spec, "grad_norm")])
        params = exported_params(spec)
        found[-1].append({name: param.tolist() for name, param in params.items()})
    assert found[0] == found[1]
    seen = visible_gpus(Path(spec.job_dir))
    assert {seen["gpu-0"], seen["gpu-1"]} == {"0", "1"}
    assert seen["params-0"] == ""


@pytest.mark.long
def test_a_killed_gpu_worker_of_two_is_named_and_its_job_goes_on_with_one(driver: Driver, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, total_steps=60, num_microbatches=4, num_ranks=2, evaluate_every=None, deadline_s=600.0)
    driver.start(spec)
    wait_for(lambda: num_steps(spec) >= 2, "the first steps", spec)
    os.kill(process_of(Path(spec.job_dir), "gpu-1"), signal.SIGKILL)
    outcome = driver.await_end(spec)
    assert outcome["status"] == "interrupted"
    assert "the process of gpu-1 died" in outcome["error"]["message"]
    again = dataclasses.replace(spec, attempt=Attempt(2), num_ranks=1)
    driver.start(again)
    wait_for(lambda: num_steps(spec) >= 60, "the other steps", spec)
    wait_for(lambda: not driver.ask("find", spec.job, 2), "the second attempt", spec)
    whole = make_spec(tmp_path / "whole", total_steps=60, num_microbatches=4, evaluate_every=None)
    driver.start(whole)
    assert driver.await_end(whole)["status"] == "succeeded"
    assert losses_of(spec) == losses_of(whole)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["gpu-0", "gpu-1"])
def test_a_stopped_gpu_worker_of_two_is_named(driver: Driver, tmp_path: Path, victim: str) -> None:
    spec = make_spec(tmp_path, total_steps=2000, num_microbatches=4, num_ranks=2, deadline_s=10.0)
    driver.start(spec)
    wait_for(lambda: num_steps(spec) >= 2, "the first steps", spec)
    process, start_s = process_of(Path(spec.job_dir), victim), time.monotonic()
    os.kill(process, signal.SIGSTOP)
    try:
        outcome = driver.await_end(spec)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert time.monotonic() - start_s < 60.0
    assert outcome["status"] == "interrupted"
    message = outcome["error"]["message"]
    assert f"{victim} has been silent" in message
    assert message.startswith(victim)


@pytest.mark.long
def test_a_slow_gpu_worker_of_two_changes_nothing_but_the_time(driver: Driver, tmp_path: Path) -> None:
    found = []
    for name in ("even", "slow"):
        spec = make_spec(tmp_path / name, total_steps=30, num_microbatches=4, num_ranks=2, evaluate_every=10)
        driver.start(spec)
        wait_for(lambda spec=spec: num_steps(spec) >= 1, "the first step", spec)  # type: ignore[misc]
        while name == "slow" and num_steps(spec) < 25:
            process = process_of(Path(spec.job_dir), "gpu-1")
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(process, signal.SIGCONT)
            time.sleep(0.05)
        assert driver.await_end(spec)["status"] == "succeeded"
        found.append((losses_of(spec), metrics_of(spec, "valid_loss")))
    assert found[0] == found[1]


@pytest.mark.long
def test_a_budget_too_small_is_refused(driver: Driver, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, host_memory_nbytes=100_000)
    driver.start(spec)
    error = driver.await_end(spec)["error"]
    assert "its budget of 97.66 KiB" in error["message"]
    assert leftovers_of(spec) == []


@pytest.mark.long
def test_a_disk_too_small_is_refused(driver: Driver, tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    layout = huge_layout()
    Path(spec.layout_file).write_text(layout.to_json())
    driver.start(spec)
    message = driver.await_end(spec)["error"]["message"]
    assert message.startswith("not enough room in ")
    # Two generations of master, exp_avg and exp_avg_sq, and less than a hundredth of that for records.
    told = re.search(r" ([\d.]+) GiB needed", message)
    assert told is not None
    needed = float(told[1]) * GIB
    assert 2 * 12 * layout.numel < needed < 1.01 * 2 * 12 * layout.numel
    assert " free" in message
    assert leftovers_of(spec) == []


def test_a_worker_that_cannot_start_ends_the_job_with_its_error(driver: Driver, tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    config = Path(spec.model_dir, "config.json")
    config.write_text(config.read_text().replace("qwen2", "no_such_model"))
    driver.start(spec)
    error = driver.await_end(spec)["error"]
    assert error["code"] == "start_failed"
    assert "no_such_model" in error["message"]
    assert not any(path.startswith(spec.arena_dir) for path in leftovers_of(spec))


def huge_layout() -> ModelLayout:
    """The layout of a model with some 2 * 10^11 parameters, in full chunks; its buffers are small."""
    chunk_numel, num_blocks = 2**20, 5000
    numel = 40 * chunk_numel
    params = [ParamSlice(name=f"w{i}", shape=(numel,), offset=0, numel=numel, decay=True) for i in range(num_blocks)]
    blocks = tuple(BlockLayout(index=BlockIndex(i), name=f"{i}", params=(param,)) for i, param in enumerate(params))
    shared = tuple((block.index,) for block in blocks)
    return ModelLayout(blocks=blocks, tied={}, chunk_numel=chunk_numel, shared=shared)


# test_kill_service.py kills the dispatcher instead.
@pytest.mark.long
def test_ray_job_whose_starter_is_killed_succeeds(home: Path, cwd: Path, driver: Driver, tmp_path: Path) -> None:
    spec = make_spec(tmp_path, total_steps=20)
    starter = Driver(home, cwd)
    starter.start(spec)
    starter.kill()
    assert num_steps(spec) < 20
    assert driver.await_end(spec)["status"] == "succeeded"
    assert len(losses_of(spec)) == 20
    assert leftovers_of(spec) == []
