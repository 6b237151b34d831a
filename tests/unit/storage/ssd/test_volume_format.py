import itertools
import string
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.storage.ids import JobId
from windlass.storage.integrity.records import is_intact
from windlass.storage.ssd.volume_format import (
    HEADER_UNITS,
    TABLE_MAGIC,
    TABLE_NBYTES,
    UNIT_NBYTES,
    Allocation,
    AllocationTable,
    Demand,
    UnitRange,
    pack_json,
    pack_table,
    units_of,
    unpack_json,
    unpack_table,
)

PAGE = 4096
heads = st.integers(1, 4 * UNIT_NBYTES // PAGE).map(lambda pages: pages * PAGE)
# From a part of a unit to more than one unit.
extents = st.integers(1, 3 * UNIT_NBYTES // PAGE).map(lambda pages: pages * PAGE)
demands = st.builds(Demand, head_nbytes=heads, extent_nbytes=extents, num_extents=st.integers(0, 12))


def _allocation(job: str, *ranges: tuple[int, int], is_ready: bool = True) -> Allocation:
    return Allocation(
        job=JobId(job), nonce="00" * 8, ranges=tuple(UnitRange(*each) for each in ranges), is_ready=is_ready
    )


def _table(*ranges: tuple[int, int]) -> AllocationTable:
    table = AllocationTable()
    for i, each in enumerate(ranges):
        table = table.with_allocation(_allocation(f"job-{i}", each))
    return table


def _units(ranges: Sequence[UnitRange]) -> list[int]:
    return [unit for each in ranges for unit in range(each.start, each.stop)]


def _check_space(table: AllocationTable, demands_of: dict[JobId, list[Demand]], capacity: int | None) -> None:
    """Checks that no unit is given twice, and that each extent is within its job's units and overlaps no other."""
    taken = [unit for each in table.allocations.values() for unit in _units(each.ranges)]
    assert len(taken) == len(set(taken))
    assert all(HEADER_UNITS <= unit < (capacity or unit + 1) for unit in taken)
    assert table.stop == max(taken, default=HEADER_UNITS - 1) + 1
    for job, wanted in demands_of.items():
        allocation = table.allocations[job]
        offsets = allocation.extent_offsets(wanted[0])
        assert len(offsets) >= sum(each.num_extents for each in wanted)
        regions = [(allocation.head_offset, wanted[0].head_nbytes)]
        regions += [(offset, wanted[0].extent_nbytes) for offset in offsets]
        regions.sort()
        assert all(a + nbytes <= b for (a, nbytes), (b, _) in itertools.pairwise(regions))
        units = set(_units(allocation.ranges))
        for offset, nbytes in regions:
            assert offset % PAGE == 0
            assert set(range(offset // UNIT_NBYTES, units_of(offset + nbytes))) <= units


class TestFindFree:
    @settings(deadline=None)
    @given(data=st.data(), capacity=st.none() | st.integers(HEADER_UNITS, 60))
    def test_any_sequence_of_jobs_keeps_them_apart(self, data: st.DataObject, capacity: int | None) -> None:
        """Jobs come, take more space, and go; given space stays in place."""
        table, demands_of = AllocationTable(), dict[JobId, list[Demand]]()
        for i in range(data.draw(st.integers(1, 12))):
            sequence = table.sequence
            job = data.draw(st.sampled_from([JobId(f"job-{i}"), *demands_of]))
            if job in demands_of and data.draw(st.booleans()):
                del demands_of[job]
                table = table.without(job)
            else:
                demand = data.draw(demands.filter(lambda demand: demand.nbytes > 0))
                before = table.allocations[job].ranges if job in demands_of else ()
                if before:
                    extent_nbytes, num = demands_of[job][0].extent_nbytes, data.draw(st.integers(1, 12))
                    demand = Demand(head_nbytes=0, extent_nbytes=extent_nbytes, num_extents=num)
                found = table.find_free(demand, capacity)
                if found is None:
                    assert capacity is not None
                    continue
                ranges = [(each.start, each.count) for each in (*before, *found)]
                table = table.with_allocation(_allocation(job, *ranges))
                demands_of[job] = [*demands_of.get(job, []), demand]
            assert table.sequence == sequence + 1
            _check_space(table, demands_of, capacity)
            gaps = table.gaps(table.stop if capacity is None else capacity)
            taken = [unit for each in table.allocations.values() for unit in _units(each.ranges)]
            assert sorted(taken + _units(gaps)) == list(range(HEADER_UNITS, capacity or table.stop))
            assert all(a.stop < b.start for a, b in itertools.pairwise(gaps))

    @settings(deadline=None)
    @given(
        gaps=st.lists(st.integers(1, 6), max_size=4),
        head=st.integers(0, 5 * 4).map(lambda quarters: quarters * UNIT_NBYTES // 4),
        extent_nbytes=st.integers(1, 3 * 4).map(lambda quarters: quarters * UNIT_NBYTES // 4),
        num_extents=st.integers(1, 10),
    )
    def test_fixed_space_refuses_only_what_cannot_fit(
        self, gaps: list[int], head: int, extent_nbytes: int, num_extents: int
    ) -> None:
        """Compared with every place for the head, and as many extents as the rest holds."""
        table, at = AllocationTable(), HEADER_UNITS
        for i, count in enumerate(gaps):
            table = table.with_allocation(_allocation(f"job-{i}", (at + count, 1)))
            at += count + 1
        demand = Demand(head_nbytes=head, extent_nbytes=extent_nbytes, num_extents=num_extents)
        rooms = [count * UNIT_NBYTES for count in gaps]
        fits = any(
            sum((room - (head if i == home else 0)) // extent_nbytes for i, room in enumerate(rooms)) >= num_extents
            for home in range(len(rooms))
            if rooms[home] >= head
        )
        found = table.find_free(demand, at)
        assert (found is not None) == fits
        if found is not None:
            allocation = _allocation("new", *((each.start, each.count) for each in found))
            _check_space(table.with_allocation(allocation), {JobId("new"): [demand]}, at)

    def test_smallest_gap_that_holds_all_is_taken(self) -> None:
        table = _table((8, 1), (12, 1), (20, 1))  # gaps of 5, 3, 7
        demand = Demand(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=2)
        assert table.find_free(demand, None) == [UnitRange(9, 3)]
        assert table.find_free(demand, 100) == [UnitRange(9, 3)]

    def test_file_grows_rather_than_to_be_cut_up(self) -> None:
        demand = Demand(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=7)
        assert _table((8, 1), (12, 1)).find_free(demand, None) == [UnitRange(13, 8)]

    def test_head_may_lie_apart_from_all_extents(self) -> None:
        table = _table((7, 1), (11, 1))  # two gaps of 4 and 3
        demand = Demand(head_nbytes=3 * UNIT_NBYTES, extent_nbytes=2 * UNIT_NBYTES, num_extents=2)
        assert table.find_free(demand, 12) == [UnitRange(8, 3), UnitRange(3, 4)]

    def test_head_is_never_split(self) -> None:
        demand = Demand(head_nbytes=5 * UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=1)
        assert _table((7, 1), (12, 1)).find_free(demand, 13) is None


class TestBytes:
    @settings(deadline=None)
    @given(
        jobs=st.dictionaries(
            st.text(string.ascii_letters + "._-é", min_size=1, max_size=128).map(JobId),
            st.tuples(
                st.binary(min_size=8, max_size=8),
                st.lists(st.tuples(st.integers(3), st.integers(1)), min_size=1),
                st.lists(st.tuples(st.integers(3), st.integers(1))),
            ),
            max_size=5,
        ),
        sequence=st.integers(0, 1 << 63),
    )
    def test_table_comes_back(
        self, jobs: dict[JobId, tuple[bytes, list[tuple[int, int]], list[tuple[int, int]]]], sequence: int
    ) -> None:
        allocations = {
            job: Allocation(
                job=job,
                nonce=nonce.hex(),
                ranges=tuple(UnitRange(*each) for each in ranges),
                is_ready=bool(nonce[0] & 1),
                scratch=tuple(UnitRange(*each) for each in scratch),
            )
            for job, (nonce, ranges, scratch) in jobs.items()
        }
        table = AllocationTable(sequence=sequence, allocations=allocations)
        raw = pack_table(table)
        assert len(raw) == TABLE_NBYTES
        assert is_intact(raw, TABLE_MAGIC)
        assert unpack_table(raw) == table

    def test_table_holds_thousands_of_jobs_and_says_when_it_is_full(self) -> None:
        table = AllocationTable(
            allocations={JobId(f"{i:036}"): _allocation(f"{i:036}", (10**6 + i, 1)) for i in range(8000)}
        )
        assert unpack_table(pack_table(table)) == table
        more = {JobId(f"{i:0128}"): _allocation(f"{i:0128}", (i, 1)) for i in range(8000)}
        with pytest.raises(ValueError, match="does not fit"):
            pack_table(AllocationTable(allocations={**table.allocations, **more}))

    def test_record_of_json_comes_back(self) -> None:
        facts = {"bytes_per_s": 3.1e9, "text": "é" * 100}
        raw = pack_json(b"WNDLTEST", facts)
        assert len(raw) == PAGE
        assert is_intact(raw, b"WNDLTEST")
        assert unpack_json(raw) == facts
