"""Digests of what the boxes of a job must have alike: settings, the layout, and copies of the model and the dataset.

Each box reads copies of its own. If one of them were of another version, the boxes would train without an error, and
the model would be wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from windlass.actors.job import JobSpec
from windlass.engine.model import ModelLayout
from windlass.engine.training_config import Initialization
from windlass.storage.integrity import GRANULE_NBYTES, buffer_digest

# Pieces of GRANULE_NBYTES that are read of each file, evenly spaced; of smaller files that is all. Files of other
# versions differ in nearly every piece, and to read the largest models whole would take minutes.
_NUM_PIECES = 16
_MAX_NAMED = 3  # differences in an error


def digests_of(spec: JobSpec, layout: ModelLayout) -> dict[str, str]:
    """Returns digests of a box's settings and of its files, by name."""
    settings = (spec.training, spec.stages, spec.ranks, spec.num_validation_examples)
    facts = (layout.blocks, sorted(layout.tied.items()), layout.chunk_numel, layout.hidden_size)
    loads_weights = spec.training.initialization is Initialization.WEIGHTS
    of_model = ("config.json", "*.safetensors") if loads_weights else ("config.json",)
    of_dataset = ("meta.json", "*.tokens", "*.targets", "*.offsets")
    return {
        "the settings": _digest(repr(settings)),
        "the model's layout": _digest(repr(facts)),
        **dict(_digests_of_files("the model's", Path(spec.model_dir), of_model)),
        **dict(_digests_of_files("the dataset's", Path(spec.dataset_dir), of_dataset)),
    }


def require_alike(box: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raises ValueError if a box's digests are not those of the first one.

    Files that one of them lacks do not count. If they are needed, their reader says so.
    """
    different = sorted(name for name in here.keys() & there.keys() if here[name] != there[name])
    if not different:
        return
    named = ", ".join(different[:_MAX_NAMED])
    rest = f" and {len(different) - _MAX_NAMED} more" if len(different) > _MAX_NAMED else ""
    raise ValueError(
        f"box {box!r} and the first box differ in {named}{rest}: all boxes of a job need the same settings, and equal "
        "copies of the model and the dataset"
    )


def _digests_of_files(whose: str, folder: Path, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        yield f"{whose} {path.name}", _digest_of_file(path)


def _digest_of_file(path: Path) -> str:
    nbytes = path.stat().st_size
    num_pieces = min(_NUM_PIECES, -(-nbytes // GRANULE_NBYTES))
    last = max(0, nbytes - GRANULE_NBYTES)
    digests = []
    with path.open("rb") as file:
        for index in range(num_pieces):
            file.seek(last * index // max(1, num_pieces - 1))
            digests.append(buffer_digest(memoryview(file.read(GRANULE_NBYTES))))
    return _digest(repr((nbytes, digests)))


def _digest(text: str) -> str:
    return f"{buffer_digest(memoryview(text.encode())):016x}"
