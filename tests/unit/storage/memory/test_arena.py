import errno
import fcntl
import mmap
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.examples import examples
from windlass.engine.memory_plan.arena.layout import make_plan
from windlass.engine.memory_plan.plan import ModelSize
from windlass.engine.model.layout import choose_chunk_numel
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import Attempt, JobId, Span
from windlass.storage.memory import arena as arena_module
from windlass.storage.memory.arena import (
    ALIGNMENT_NBYTES,
    Arena,
    SlotMisuse,
    SlotPool,
    arena_path,
    remove_leftovers,
)
from windlass.storage.memory.capacity import InsufficientSpaceError

JOB = JobId("ftjob-1")
KIB_64 = 65536

CREATOR = """
import os, signal, sys
from pathlib import Path
from windlass.storage.memory.arena import Arena, arena_path
from windlass.storage.ids import Attempt, JobId
if "killed-early" in sys.argv:
    os.posix_fallocate = lambda fd, offset, nbytes: os.kill(os.getpid(), signal.SIGKILL)
arena = Arena.create(arena_path(Path(sys.argv[1]), JobId("ftjob-2"), Attempt(3)), 65536)
print(arena.path, flush=True)
sys.stdin.read()
"""
REMOVER = """
import sys
from pathlib import Path
from windlass.storage.memory.arena import remove_leftovers
print(*remove_leftovers(Path(sys.argv[1])))
"""
NEW_PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child=KILL"]


def _resident_nbytes(path: Path) -> list[int]:
    """For every mapping of a file in this process, the bytes in its page table. Source: proc_pid_smaps(5)."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(f" {path}")]
    return [int(next(line for line in lines[i:] if line.startswith("Rss:")).split()[1]) * 1024 for i in starts]


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A directory in a memory-backed file system."""
    if shutil.disk_usage("/dev/shm").free < 64 << 20:
        pytest.skip("less than 64 MiB are free in /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="windlass-test-") as directory:
        yield Path(directory)


class TestArena:
    def test_both_mappings_show_the_same_bytes(self, tmp_path: Path) -> None:
        created = Arena.create(arena_path(tmp_path, JOB, Attempt(1)), KIB_64)
        opened = Arena.open(created.path)
        created.buffer(Span(4096, 4096))[:] = bytes(range(256)) * 16
        assert opened.buffer(Span(4096, 4096)) == bytes(range(256)) * 16
        opened.buffer(Span(0, 3))[:] = b"abc"
        assert created.buffer(Span(0, 4)) == b"abc\0"
        assert opened.nbytes == KIB_64

    def test_file_has_exact_size_is_backed_and_private(self, tmp_path: Path) -> None:
        path = Arena.create(tmp_path / "arena", 3 * 4096).path
        facts = path.stat()
        assert facts.st_size == 3 * 4096
        assert facts.st_blocks * 512 >= 3 * 4096
        assert facts.st_mode & 0o777 == 0o600

    def test_buffer_outlives_close_and_unlink(self, tmp_path: Path) -> None:
        arena = Arena.create(tmp_path / "arena", 4096)
        buffer = arena.buffer(Span(0, 4))
        arena.close()
        arena.unlink()
        buffer[:] = b"held"
        assert bytes(buffer) == b"held"
        assert not arena.path.exists()

    def test_closed_arena_gives_no_buffers_and_is_unmapped_with_the_last(self, tmp_path: Path) -> None:
        arena = Arena.create(tmp_path / "arena", 4096)
        buffer = arena.buffer(Span(0, 4))
        arena.close()
        arena.close()
        with pytest.raises(ValueError, match="is closed"):
            arena.buffer(Span(0, 4))
        assert len(_resident_nbytes(arena.path)) == 1
        buffer.release()
        assert _resident_nbytes(arena.path) == []

    def test_only_open_fills_page_tables(self, shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        try:
            mmap.mmap(-1, 4096).madvise(arena_module._MADV_POPULATE_READ)
        except OSError as error:
            pytest.skip(f"this kernel does not fill page tables on demand: {error}")
        monkeypatch.setattr(arena_module, "_POPULATE_STEP_NBYTES", 65536)  # the last step is a short one
        created = Arena.create(shared_memory / "arena", 5 * 65536 + 8192)
        assert _resident_nbytes(created.path) == [0]
        opened = Arena.open(created.path)
        assert sorted(_resident_nbytes(created.path)) == [0, opened.nbytes]

    def test_open_without_populate_support_works(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arena_module, "_MADV_POPULATE_READ", 12345)  # as unknown as it was to Linux 5.13
        created = Arena.create(tmp_path / "arena", 4096)
        Arena.open(created.path).buffer(Span(0, 1))[:] = b"x"
        assert bytes(created.buffer(Span(0, 1))) == b"x"

    @pytest.mark.parametrize("span", [Span(0, 8193), Span(8192, 1), Span(-1, 1), Span(0, -1)])
    def test_span_outside_is_refused(self, tmp_path: Path, span: Span) -> None:
        arena = Arena.create(tmp_path / "arena", 8192)
        with pytest.raises(ValueError, match="outside the arena"):
            arena.buffer(span)

    @pytest.mark.parametrize("nbytes", [0, -4096, 4095])
    def test_odd_size_is_refused(self, tmp_path: Path, nbytes: int) -> None:
        with pytest.raises(ValueError, match=f"not {nbytes}"):
            Arena.create(tmp_path / "arena", nbytes)

    def test_too_large_is_refused_with_nothing_left(self, tmp_path: Path) -> None:
        with pytest.raises(InsufficientSpaceError, match=r"1024\.00 PiB needed"):
            Arena.create(tmp_path / "arena", 1 << 60)
        assert list(tmp_path.iterdir()) == []

    def test_room_lost_during_creation_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(fd: int, offset: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(InsufficientSpaceError) as caught:
            Arena.create(tmp_path / "arena", 4096)
        assert list(tmp_path.iterdir()) == []
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    def test_room_lost_during_creation_is_told_without_the_arenas_own_pages(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        created: list[int] = []

        def full(fd: int, offset: int, nbytes: int) -> None:
            os.pwrite(fd, bytes(nbytes), offset)
            created.append(os.dup(fd))
            raise OSError(errno.ENOSPC, "No space left on device")

        def free_nbytes(directory: Path) -> int:
            return KIB_64 - os.fstat(created[0]).st_blocks * 512

        monkeypatch.setattr(os, "posix_fallocate", full)
        monkeypatch.setattr(arena_module, "require_arena_room", lambda directory, nbytes: None)
        monkeypatch.setattr(arena_module, "directory_free_nbytes", free_nbytes)
        with pytest.raises(InsufficientSpaceError) as caught:
            Arena.create(tmp_path / "arena", KIB_64)
        os.close(created[0])
        assert caught.value.free_nbytes == KIB_64

    def test_existing_file_is_never_taken_over(self, tmp_path: Path) -> None:
        arena = Arena.create(tmp_path / "arena", 4096)
        arena.buffer(Span(0, 1))[:] = b"x"
        with pytest.raises(FileExistsError):
            Arena.create(tmp_path / "arena", 4096)
        assert bytes(arena.buffer(Span(0, 1))) == b"x"


@contextmanager
def _creator(directory: Path, *command: str) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """A process that has made an arena and holds it until its input ends; `command` goes before Python's."""
    with subprocess.Popen(
        [*command, sys.executable, "-c", CREATOR, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if not line:
            error = process.stderr.read().strip()
            assert command, error
            pytest.skip(f"cannot run {' '.join(command)}: {error}")
        yield Path(line.strip()), process


class TestLeftovers:
    def test_only_a_killed_creators_arena_goes(self, tmp_path: Path) -> None:
        own = Arena.create(arena_path(tmp_path, JOB, Attempt(1)), 4096)
        foreign = tmp_path / "windlass-notes.arena"
        foreign.write_text("not an arena")
        with _creator(tmp_path) as (path, process):
            assert path.name == f"windlass-ftjob-2-3-{process.pid}.arena"
            assert remove_leftovers(tmp_path) == []
            mapped = Arena.open(path)  # as a worker of the job that is still alive when the creator is killed
            mapped.buffer(Span(0, 4))[:] = b"mine"
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert remove_leftovers(tmp_path) == [path]
            assert bytes(mapped.buffer(Span(0, 4))) == b"mine"
        assert remove_leftovers(tmp_path) == []
        assert sorted(tmp_path.iterdir()) == sorted([own.path, foreign])

    def test_a_creator_killed_before_it_was_done(self, tmp_path: Path) -> None:
        done = subprocess.run([sys.executable, "-c", CREATOR, str(tmp_path), "killed-early"], check=False)
        assert done.returncode == -signal.SIGKILL
        (path,) = tmp_path.iterdir()
        assert remove_leftovers(tmp_path) == [path]

    def test_pid_used_again_by_another_process_counts_as_dead(self, tmp_path: Path) -> None:
        path = tmp_path / f"windlass-ftjob-1-1-{os.getppid()}.arena"
        Arena.create(path, 4096).close()
        assert remove_leftovers(tmp_path) == [path]

    def test_held_buffers_count_as_alive(self, tmp_path: Path) -> None:
        arena = Arena.create(arena_path(tmp_path, JOB, Attempt(1)), 4096)
        buffer = arena.buffer(Span(0, 4096))
        arena.close()
        assert remove_leftovers(tmp_path) == []
        buffer.release()
        assert remove_leftovers(tmp_path) == [arena.path]

    def test_creator_in_another_pid_namespace(self, tmp_path: Path) -> None:
        with _creator(tmp_path, *NEW_PID_NAMESPACE) as (path, process):
            assert path.name.endswith("-3-1.arena")  # the pid of the first process in any container
            assert remove_leftovers(tmp_path) == []
            process.send_signal(signal.SIGKILL)
            process.wait()
            _wait_for_lock(path)
            assert remove_leftovers(tmp_path) == [path]

    def test_remover_in_another_pid_namespace(self, tmp_path: Path) -> None:
        dead = tmp_path / "windlass-ftjob-1-1-1.arena"
        Arena.create(dead, 4096).close()
        with _creator(tmp_path) as (path, _):
            command = [*NEW_PID_NAMESPACE, sys.executable, "-c", REMOVER, str(tmp_path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no pid namespaces here: {done.stderr}")
            assert done.stdout.split() == [str(dead)]
            assert path.exists()

    def test_another_users_arena_stays(self, tmp_path: Path) -> None:
        theirs = tmp_path / "windlass-ftjob-1-1-7.arena"
        Arena.create(theirs, 4096).close()
        try:
            os.chown(theirs, os.geteuid() + 1, -1)
        except PermissionError:
            pytest.skip("only root can give a file to another user")
        assert remove_leftovers(tmp_path) == []
        assert theirs.exists()

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        target = tmp_path / "target"
        target.write_text("precious")
        link = tmp_path / "windlass-ftjob-1-1-7.arena"
        link.symlink_to(target)
        assert remove_leftovers(tmp_path) == []
        assert link.is_symlink()
        assert target.exists()

    def test_taken_for_a_leftover_before_it_is_locked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = arena_path(tmp_path, JOB, Attempt(1))
        removed: list[Path] = []
        lock = fcntl.flock

        def lock_late(fd: int, operation: int) -> None:
            monkeypatch.setattr(fcntl, "flock", lock)
            removed.extend(remove_leftovers(tmp_path))
            lock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", lock_late)
        arena = Arena.create(path, 4096)
        assert removed == [path]
        assert Arena.open(path).nbytes == arena.nbytes == 4096
        assert remove_leftovers(tmp_path) == []

    def test_two_concurrent_cleanups_never_remove_a_new_arena(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = arena_path(tmp_path, JOB, Attempt(1))
        Arena.create(path, 4096).close()
        lock = fcntl.flock
        living: list[Arena] = []

        def lock_late(fd: int, operation: int) -> None:
            monkeypatch.setattr(fcntl, "flock", lock)
            assert remove_leftovers(tmp_path) == [path]
            living.append(Arena.create(path, 4096))
            lock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", lock_late)
        assert remove_leftovers(tmp_path) == []
        assert path.exists()
        assert len(living) == 1


def _wait_for_lock(path: Path) -> None:
    """Returns once the arena's lock is free: a killed process ends a moment after its creator."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


class SlotPoolMachine(RuleBasedStateMachine):
    """For any acquires and releases, no byte has two owners and the statistics are true."""

    OFFSET, SLOT, NUM = 8192, 4096, 5

    @initialize()
    def start(self) -> None:
        self.pool = SlotPool(self.OFFSET, self.SLOT, self.NUM, name="grads", token=CancelToken(0.0))
        self.held: list[Span] = []
        self.most = 0

    @rule(n=st.integers(0, 5))
    def acquire(self, n: int) -> None:
        if n <= self.NUM - len(self.held):
            taken = self.pool.acquire(n)
            assert len(taken) == n
            self.held += taken
            self.most = max(self.most, len(self.held))
        else:
            with pytest.raises(TimeoutError):
                self.pool.acquire(n)

    @rule(n=st.integers(0, 5))
    def try_to_acquire(self, n: int) -> None:
        taken = self.pool.try_acquire(n)
        assert len(taken) == (n if n <= self.NUM - len(self.held) else 0)
        self.held += taken
        self.most = max(self.most, len(self.held))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        spans = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        self.pool.release(spans)
        for span in spans:
            self.held.remove(span)

    @rule(data=st.data())
    def release_wrongly(self, data: st.DataObject) -> None:
        free = [Span(self.OFFSET + i * self.SLOT, self.SLOT) for i in range(self.NUM)]
        wrong = [Span(0, 4096), Span(self.OFFSET, 8192), Span(self.OFFSET + 1, self.SLOT)]
        wrong += [span for span in free if span not in self.held]
        bad = data.draw(st.sampled_from(wrong))
        with pytest.raises(SlotMisuse, match="grads"):
            self.pool.release([*self.held, bad])
        if self.held:
            with pytest.raises(SlotMisuse):
                self.pool.release([self.held[0], self.held[0]])

    @invariant()
    def owners_are_disjoint_and_counted(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert len({span.offset for span in self.held}) == len(self.held)
        for span in self.held:
            assert span.nbytes == self.SLOT
            assert (span.offset - self.OFFSET) % self.SLOT == 0
            assert self.OFFSET <= span.offset < self.OFFSET + self.NUM * self.SLOT
        statistics = self.pool.statistics
        assert statistics.held_nbytes == self.NUM * self.SLOT
        assert statistics.in_use_nbytes == len(self.held) * self.SLOT
        assert statistics.high_water_nbytes == self.most * self.SLOT


TestSlotPoolMachine = SlotPoolMachine.TestCase
TestSlotPoolMachine.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)


class TestSlotPool:
    def test_timeout_names_pool_and_deadline(self) -> None:
        pool = SlotPool(0, 4096, 2, name="params of gpu-0", token=CancelToken(0.01))
        pool.acquire(1)
        with pytest.raises(TimeoutError, match=r"waited 0\.01 s for 2 slots .* params of gpu-0: 1 of 2 are in use"):
            pool.acquire(2)
        assert len(pool.acquire(1)) == 1  # the failed request took nothing

    def test_cancel_ends_the_wait_for_slots(self) -> None:
        token = CancelToken()
        pool = SlotPool(0, 4096, 2, token=token)
        (slot,) = pool.acquire(1)
        threading.Timer(0.05, token.cancel).start()
        with pytest.raises(InterruptedError, match="the job was stopped"):
            pool.acquire(2)
        pool.release([slot])
        assert pool.statistics.in_use_nbytes == 0

    def test_more_than_there_are_is_refused_at_once(self) -> None:
        with pytest.raises(ValueError, match="3 were requested"):
            SlotPool(0, 4096, 2, token=CancelToken(30.0)).acquire(3)

    @pytest.mark.parametrize(("offset", "slot"), [(1, 4096), (0, 4095), (0, 0), (-4096, 4096)])
    def test_unaligned_slots_are_refused(self, offset: int, slot: int) -> None:
        with pytest.raises(ValueError, match=str(ALIGNMENT_NBYTES)):
            SlotPool(offset, slot, 1, token=CancelToken())

    def test_large_request_is_served_before_later_small_ones(self) -> None:
        pool = SlotPool(0, 4096, 2, token=CancelToken(30.0))
        first = pool.acquire(1)
        order: list[str] = []

        def take(name: str, n: int) -> None:
            spans = pool.acquire(n)
            order.append(name)
            pool.release(spans)

        large = threading.Thread(target=take, args=("large", 2))
        large.start()
        while not pool._waiting:
            threading.Event().wait(0.001)
        small = threading.Thread(target=take, args=("small", 1))
        small.start()
        while len(pool._waiting) < 2:
            threading.Event().wait(0.001)
        assert order == []  # one slot is free, and yet the small request waits its turn
        assert pool.try_acquire(1) == []
        pool.release(first)
        large.join(30)
        small.join(30)
        assert order == ["large", "small"]

    def test_threads_never_share_a_slot(self) -> None:
        pool = SlotPool(0, 4096, 3, token=CancelToken(30.0))
        owners: dict[int, int] = {}
        clashes: list[int] = []

        def work(me: int) -> None:
            for n in (1, 2, 3, 1, 2) * 20:
                spans = pool.acquire(n)
                for span in spans:
                    if owners.setdefault(span.offset, me) != me:
                        clashes.append(span.offset)
                for span in spans:
                    del owners[span.offset]
                pool.release(spans)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert clashes == []
        assert pool.statistics.in_use_nbytes == 0


@pytest.mark.parametrize(
    ("hidden", "intermediate", "vocab", "num_layers"), [(33, 51, 97, 3), (65, 177, 515, 4), (129, 343, 1009, 2)]
)
@pytest.mark.parametrize(("param_itemsize", "grad_itemsize", "state_itemsize"), [(2, 2, 14), (2, 4, 14), (4, 4, 12)])
def test_memory_held_is_the_memory_that_chunks_ask_for(
    shared_memory: Path,
    hidden: int,
    intermediate: int,
    vocab: int,
    num_layers: int,
    param_itemsize: int,
    grad_itemsize: int,
    state_itemsize: int,
) -> None:
    """The ratio of held to requested bytes is 1.0: by the kernel's count, by the pools', and with every slot in use."""
    layer = 4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden
    block_numels = (vocab * hidden, *[layer] * num_layers, vocab * hidden + hidden)
    chunk_numel = choose_chunk_numel(list(block_numels))
    size = ModelSize(
        block_numels=block_numels, chunk_numel=chunk_numel, param_itemsize=param_itemsize, state_itemsize=state_itemsize
    )
    plan = make_plan(size, num_optimizers=2, grad_itemsize=grad_itemsize, keep_grads=True, host_memory_nbytes=None)
    requested = chunk_numel * (plan.params.num_slots * param_itemsize + plan.grads.num_slots * grad_itemsize)
    requested += chunk_numel * sum(pool.num_slots for pool in plan.states) * state_itemsize

    arena = Arena.create(shared_memory / "arena", plan.arena_nbytes)
    pools = [
        SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots, token=CancelToken())
        for pool in (plan.params, plan.grads, *plan.states)
    ]
    taken = [slot for pool in pools for slot in pool.acquire(pool.num_slots)]
    slots = sorted(taken, key=lambda slot: slot.offset)
    for slot in slots:
        arena.buffer(slot)[:] = b"x" * slot.nbytes
    assert arena.held_nbytes == requested
    assert sum(pool.statistics.held_nbytes for pool in pools) == requested
    assert sum(pool.statistics.in_use_nbytes for pool in pools) == requested
    assert [slot.offset for slot in slots] == [0, *accumulate(slot.nbytes for slot in slots)][:-1]
    assert slots[-1].offset + slots[-1].nbytes == arena.nbytes
    assert chunk_numel & (chunk_numel - 1) != 0  # an allocator that rounds to powers of two would hold more
