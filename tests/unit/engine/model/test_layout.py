import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.model.layout import BlockLayout, ModelLayout, ParamSlice
from windlass.storage.ids import BlockIndex, ChunkIndex, ChunkKey


@st.composite
def layouts(draw: st.DrawFn) -> ModelLayout:
    """Blocks of a few parameters, some with none, laid out as by the partition."""
    blocks = []
    for b in range(draw(st.integers(1, 4))):
        params, offset = [], 0
        shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), max_size=5))
        num_decaying = draw(st.integers(0, len(shapes)))
        for p, shape in enumerate(shapes):
            numel = 1
            for size in shape:
                numel *= size
            params.append(
                ParamSlice(name=f"layers.{b}.{p}", shape=shape, offset=offset, numel=numel, decay=p < num_decaying)
            )
            offset += numel
        blocks.append(BlockLayout(index=BlockIndex(b), name=f"block {b}", params=tuple(params)))
    last = len(blocks) - 1
    return ModelLayout(
        blocks=tuple(blocks),
        tied=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
        chunk_numel=draw(st.integers(1, 60)),
        shared=tuple((BlockIndex(b),) if b < last else (BlockIndex(b), BlockIndex(0)) for b in range(len(blocks))),
    )


@given(layouts())
def test_json_brings_back_the_very_layout(layout: ModelLayout) -> None:
    text = layout.to_json()
    assert ModelLayout.from_json(text) == layout
    assert hash(ModelLayout.from_json(text).blocks) == hash(layout.blocks)  # nested tuples, no lists
    json.loads(text)


@given(layouts())
def test_chunks_cover_every_element_once(layout: ModelLayout) -> None:
    for block in layout.blocks:
        keys = layout.chunk_keys(block.index)
        assert keys == [ChunkKey(block.index, ChunkIndex(i)) for i in range(layout.num_chunks(block.index))]
        assert keys  # a block without parameters has a chunk too, so that every block is updated and committed alike
        ranges = [layout.chunk_range(key) for key in keys]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == block.numel
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        assert all(0 < stop - start <= layout.chunk_numel for start, stop in ranges) or block.numel == 0


@given(layouts())
def test_params_in_chunks_cover_every_element_of_every_parameter_once(layout: ModelLayout) -> None:
    for block in layout.blocks:
        seen: dict[str, list[int]] = {param.name: [] for param in block.params}
        flat: list[int] = []
        for key in layout.chunk_keys(block.index):
            start, stop = layout.chunk_range(key)
            places: list[int] = []
            for param, first, count, place in layout.params_in_chunk(key):
                assert count > 0
                assert start + place == param.offset + first
                seen[param.name] += range(first, first + count)
                places += range(place, place + count)
            assert places == list(range(stop - start))
            flat += [start + place for place in places]
        assert flat == list(range(block.numel))
        assert seen == {param.name: list(range(param.numel)) for param in block.params}


@given(layouts())
def test_numbers_of_elements_add_up(layout: ModelLayout) -> None:
    assert layout.numel == sum(param.numel for block in layout.blocks for param in block.params)
    for block in layout.blocks:
        assert block.decay_numel == sum(param.numel for param in block.params if param.decay)


@given(layouts(), st.integers(0, 4))
def test_boxes_divide_the_blocks_and_know_what_they_lend_and_borrow(layout: ModelLayout, cut: int) -> None:
    last = len(layout.blocks) - 1
    first, second = layout.of_blocks(0, min(cut, last)), layout.of_blocks(min(cut, last), last + 1)
    assert first.numel + second.numel == layout.numel
    is_apart = cut > 0 and last > 0  # the last block uses the params of the first one
    assert (first.lent, second.borrowed) == ((frozenset({0}),) * 2 if is_apart else (frozenset(),) * 2)
    assert not first.borrowed
    assert not second.lent
    for block in layout.blocks:
        ranges = [layout.chunk_range(key) for key in layout.chunk_keys(block.index)] if block.numel else []
        assert first.chunk_ranges(block.index) == second.chunk_ranges(block.index) == ranges
