import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from windlass.storage.arena import (
    ALIGNMENT_NBYTES,
    Arena,
    SlotMisuse,
    SlotPool,
    SlotTimeout,
    arena_path,
    remove_leftovers,
)
from windlass.storage.ids import Attempt, JobId, Span
from windlass.storage.room import NotEnoughRoom

JOB = JobId("ftjob-1")
KIB_64 = 65536

CREATOR = """
import sys
from pathlib import Path
from windlass.storage.arena import Arena, arena_path
from windlass.storage.ids import Attempt, JobId
arena = Arena.create(arena_path(Path(sys.argv[1]), JobId("ftjob-2"), Attempt(3)), 65536)
print(arena.path, flush=True)
sys.stdin.read()
"""


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
        with pytest.raises(NotEnoughRoom, match=f"{1 << 60} bytes"):
            Arena.create(tmp_path / "arena", 1 << 60)
        assert list(tmp_path.iterdir()) == []

    def test_room_lost_during_creation_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(fd: int, offset: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NotEnoughRoom) as caught:
            Arena.create(tmp_path / "arena", 4096)
        assert list(tmp_path.iterdir()) == []
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    def test_existing_file_is_never_taken_over(self, tmp_path: Path) -> None:
        arena = Arena.create(tmp_path / "arena", 4096)
        arena.buffer(Span(0, 1))[:] = b"x"
        with pytest.raises(FileExistsError):
            Arena.create(tmp_path / "arena", 4096)
        assert bytes(arena.buffer(Span(0, 1))) == b"x"


class TestLeftovers:
    def test_only_a_dead_creators_arena_goes(self, tmp_path: Path) -> None:
        own = Arena.create(arena_path(tmp_path, JOB, Attempt(1)), 4096)
        foreign = tmp_path / "windlass-notes.arena"
        foreign.write_text("not an arena")
        with subprocess.Popen(
            [sys.executable, "-c", CREATOR, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            path = Path(child.stdout.readline().strip())
            assert path.name.startswith(f"windlass-ftjob-2-3-{child.pid}-")
            assert remove_leftovers(tmp_path) == []
            assert path.exists()
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert remove_leftovers(tmp_path) == [path]
        assert sorted(tmp_path.iterdir()) == sorted([own.path, foreign])

    def test_creator_in_another_pid_namespace_counts_as_alive(self, tmp_path: Path) -> None:
        # Seen from here its pid means nothing: the name below is that of a process that does not exist.
        arena = Arena.create(tmp_path / "windlass-ftjob-1-1-4194999-1.arena", 4096)
        assert remove_leftovers(tmp_path) == []
        arena.close()
        assert remove_leftovers(tmp_path) == [arena.path]

    def test_pid_used_again_by_another_process_counts_as_dead(self, tmp_path: Path) -> None:
        path = tmp_path / f"windlass-ftjob-1-1-{os.getpid()}-1.arena"
        Arena.create(path, 4096).close()
        assert remove_leftovers(tmp_path) == [path]


class SlotPoolMachine(RuleBasedStateMachine):
    """Whatever is acquired and released, no byte has two owners and the statistics are true."""

    OFFSET, SLOT, NUM = 8192, 4096, 5

    @initialize()
    def start(self) -> None:
        self.pool = SlotPool(self.OFFSET, self.SLOT, self.NUM, name="grads")
        self.held: list[Span] = []
        self.most = 0

    @rule(n=st.integers(0, 5))
    def acquire(self, n: int) -> None:
        if n <= self.NUM - len(self.held):
            taken = self.pool.acquire(n, 0.0)
            assert len(taken) == n
            self.held += taken
            self.most = max(self.most, len(self.held))
        else:
            with pytest.raises(SlotTimeout):
                self.pool.acquire(n, 0.0)

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
TestSlotPoolMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class TestSlotPool:
    def test_timeout_names_pool_and_deadline(self) -> None:
        pool = SlotPool(0, 4096, 2, name="params of gpu-0")
        pool.acquire(1, 0.0)
        with pytest.raises(SlotTimeout, match=r"params of gpu-0.* 2 slots .*0\.01 s; 1 of 2"):
            pool.acquire(2, 0.01)
        assert len(pool.acquire(1, 0.0)) == 1  # the failed request took nothing

    def test_more_than_there_are_is_refused_at_once(self) -> None:
        with pytest.raises(ValueError, match="3 were asked"):
            SlotPool(0, 4096, 2).acquire(3, 60.0)

    @pytest.mark.parametrize(("offset", "slot"), [(1, 4096), (0, 4095), (0, 0), (-4096, 4096)])
    def test_unaligned_slots_are_refused(self, offset: int, slot: int) -> None:
        with pytest.raises(ValueError, match=str(ALIGNMENT_NBYTES)):
            SlotPool(offset, slot, 1)

    def test_large_request_is_served_before_later_small_ones(self) -> None:
        pool = SlotPool(0, 4096, 2)
        first = pool.acquire(1, 0.0)
        order: list[str] = []

        def take(name: str, n: int) -> None:
            spans = pool.acquire(n, 30.0)
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
        pool.release(first)
        large.join(30)
        small.join(30)
        assert order == ["large", "small"]

    def test_threads_never_share_a_slot(self) -> None:
        pool = SlotPool(0, 4096, 3)
        owners: dict[int, int] = {}
        clashes: list[int] = []

        def work(me: int) -> None:
            for n in (1, 2, 3, 1, 2) * 20:
                spans = pool.acquire(n, 30.0)
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
