"""Many jobs share the SSDs and the shared memory and end in every possible way; none leaves anything behind."""

import dataclasses
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cut_off import CutOff
from tests.support.training import has_direct_io, leftovers_of, make_partition, make_spec
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import BlockComputed, CommitStore, LoadModel, Message, UpdateStep
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.memory_plan.plan import PlanError
from windlass.storage.ids import ActorName, Attempt, JobId
from windlass.storage.integrity.errors import StoreError
from windlass.storage.memory.arena import remove_leftovers
from windlass.storage.ssd.device import SsdDevice
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import HEADER_UNITS, UNIT_NBYTES
from windlass.storage.store.tensor_store import TensorStore

# Trains a pickled job until it kills its own process while it sends a message.
_KILLED = """
import os, pickle, random, signal, sys
from tests.support.training import make_partition
from windlass.actors.runtime.local_runner import run_local
spec, after = pickle.loads(bytes.fromhex(sys.argv[1]))
num = 0
def look(to, message):
    global num
    num += 1
    if num == after:
        os.kill(os.getpid(), signal.SIGKILL)
run_local(spec, partition=make_partition(spec), on_message=look)
"""


def succeeds(spec: JobSpec, chance: random.Random) -> None:
    assert run_local(spec, partition=make_partition(spec))["status"] == "succeeded"


def fails_in_loading(spec: JobSpec, chance: random.Random) -> None:
    weights = Path(spec.model_dir) / "model.safetensors"
    hidden = weights.rename(weights.with_suffix(".hidden"))
    assert run_local(spec, partition=make_partition(spec))["status"] == "failed"
    hidden.rename(weights)


def fails_in_the_ssd(spec: JobSpec, chance: random.Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        write, num_left = SsdDevice.write, [chance.randrange(30)]

        def fails(self: SsdDevice, offset: int, buffer: memoryview) -> int:
            num_left[0] -= 1
            if num_left[0] < 0:
                raise OSError(5, "Input/output error")
            return write(self, offset, buffer)

        patch.setattr(SsdDevice, "write", fails)
        assert run_local(spec, partition=make_partition(spec))["status"] == "failed"


def diverges(spec: JobSpec, chance: random.Random) -> None:
    outcome = run_local(spec.with_training(learning_rate=1e30, warmup_steps=0), partition=make_partition(spec))
    assert outcome["status"] == "failed"


def is_refused(spec: JobSpec, chance: random.Random) -> None:
    with pytest.raises(PlanError):
        run_local(dataclasses.replace(spec, host_memory_nbytes=4096), partition=make_partition(spec))


def is_cut_off_and_resumed(spec: JobSpec, chance: random.Random) -> None:
    is_cut_off(spec, chance)
    succeeds(dataclasses.replace(spec, attempt=Attempt(2)), chance)


def is_resumed_by_an_older_attempt(spec: JobSpec, chance: random.Random) -> None:
    is_cut_off(dataclasses.replace(spec, attempt=Attempt(3)), chance)
    with pytest.raises(StoreError, match="attempt 3 has taken over"):
        run_local(dataclasses.replace(spec, attempt=Attempt(2)), partition=make_partition(spec))


def is_cut_off(spec: JobSpec, chance: random.Random) -> None:
    kind, step = chance.choice([(LoadModel, 0), (CommitStore, 0), (UpdateStep, 1), (CommitStore, 1), (UpdateStep, 2)])

    def look(to: ActorName, message: Message) -> None:
        if type(message) is kind and message.step == step and not isinstance(message, BlockComputed):
            raise CutOff

    with pytest.raises(CutOff):
        run_local(spec, partition=make_partition(spec), on_message=look)


def is_killed(spec: JobSpec, chance: random.Random) -> None:
    argument = pickle.dumps((spec, chance.randrange(1, 300))).hex()
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _KILLED, argument], cwd=root, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL


QUICK: tuple[Callable[[JobSpec, random.Random], None], ...] = (
    succeeds,
    fails_in_loading,
    fails_in_the_ssd,
    diverges,
    is_refused,
    is_cut_off_and_resumed,
    is_resumed_by_an_older_attempt,
    is_cut_off,
)


@pytest.mark.parametrize("num_jobs", [5, pytest.param(50, marks=pytest.mark.long)])
def test_jobs_ended_in_every_way_leave_nothing(tmp_path: Path, num_jobs: int) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip(f"the file system of {tmp_path} refuses O_DIRECT")
    chance = random.Random(num_jobs)
    spec = make_spec(tmp_path, total_steps=3, evaluate_every=None)
    (tmp_path / "shm").mkdir()
    for number in range(num_jobs):
        end = is_killed if number % 5 == 4 else QUICK[number % len(QUICK)]
        job = dataclasses.replace(
            spec,
            job=JobId(f"{spec.job}-{number}"),
            output_dir=str(tmp_path / f"out-{number}"),
            job_dir=str(tmp_path / f"job-{number}"),
        )
        Path(job.job_dir).mkdir()
        end(job, chance)
        # The clean-up that the dispatcher does once a job is over and its processes are gone.
        for ssd_dir in spec.ssd_dirs:
            volume = Volume.open(ssd_dir)
            TensorStore.delete(volume, job.job)
            volume.close()
        remove_leftovers(Path(spec.arena_dir))
        assert leftovers_of(job) == [], end
    for ssd_dir in spec.ssd_dirs:
        (volume_file,) = Path(ssd_dir).iterdir()
        facts = volume_file.stat()
        assert facts.st_size == HEADER_UNITS * UNIT_NBYTES
        assert facts.st_blocks * 512 <= facts.st_size + UNIT_NBYTES
