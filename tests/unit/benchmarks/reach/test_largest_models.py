"""The search for the largest model over GPU memory and RAM, and its picture."""

from xml.etree import ElementTree

import pytest

from benchmarks.papers.decoder_sizes import block_numels
from benchmarks.reach import largest_models
from benchmarks.reach.largest_models import GPU_GIB, RAM_GIB, SIZES, Kind, kinds, largest_of, picture, shape_of
from windlass.storage.ids import StatePrecision

KIND = Kind(states=StatePrecision.FP32, clips=True, batch_size=1)


@pytest.mark.parametrize("billions", SIZES)
def test_a_shape_is_of_about_its_size(billions: int) -> None:
    shape = shape_of(billions)
    assert sum(block_numels(shape, num_tokens=1024)) == pytest.approx(billions * 1e9, rel=0.08)


@pytest.mark.parametrize("num_gib", [0.0, 0.4, 7.0, 20.0, 10_000.0])
def test_the_search_finds_the_border_with_few_checks(num_gib: float) -> None:
    checked = list[tuple[int, int, int]]()

    def fits(kind: Kind, index: int, gpu_gib: int, ram_gib: int) -> bool:
        checked.append((index, gpu_gib, ram_gib))
        return SIZES[index] <= num_gib * gpu_gib / 24 * (ram_gib / 64) ** 0.5

    found = largest_of(KIND, fits)
    for ram_gib, row in zip(RAM_GIB, found, strict=True):
        expected = [
            sum(size <= num_gib * gpu_gib / 24 * (ram_gib / 64) ** 0.5 for size in SIZES) for gpu_gib in GPU_GIB
        ]
        assert row == expected
    assert len(checked) <= 3 * len(RAM_GIB) * len(GPU_GIB)


def test_the_picture_has_each_number_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {kind: [[1] * len(GPU_GIB)] * len(RAM_GIB) for line in kinds() for kind in line}
    tables[KIND] = [[len(SIZES)] * len(GPU_GIB)] * len(RAM_GIB)
    texts = [each.text for each in ElementTree.fromstring(picture(tables)).iter("{http://www.w3.org/2000/svg}text")]
    num_cells = len(GPU_GIB) * len(RAM_GIB)
    assert texts.count(f"{SIZES[-1]}+") == num_cells
    assert texts.count(f"{SIZES[0]}") == num_cells * (len(tables) - 1)
    assert set(largest_models.RAM_GIB) <= {int(text) for text in texts if text is not None and text.isdigit()}
    assert {kind.in_words for kind in tables} <= set(texts)
