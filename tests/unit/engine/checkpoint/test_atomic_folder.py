from pathlib import Path

from windlass.engine.checkpoint.atomic_folder import make_partial_folder, remove_partial_folders


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_partial_folders_of_target_are_removed_and_no_others(tmp_path: Path) -> None:
    target = tmp_path / "ft:[a].b::1"
    others = {
        make_partial_folder(tmp_path / name).name
        for name in ("ft:[a].b::1.x", "ft:[a].b::1-step-3", "ft:a.b::1", "ft:[a].b::11", "xft:[a].b::1")
    }
    (tmp_path / ".ft:[a].b::1.mine.partial").mkdir()
    target.mkdir()
    kept = {*others, target.name, ".ft:[a].b::1.mine.partial"}
    for _ in range(2):
        (make_partial_folder(target) / "weights").write_bytes(b"half")
    assert len(names(tmp_path)) == len(kept) + 2
    remove_partial_folders(target)
    assert names(tmp_path) == kept


def test_partial_folders_of_checkpoints_are_removed_too(tmp_path: Path) -> None:
    for name in ("a", "a-step-3", "a-step-20"):
        make_partial_folder(tmp_path / name)
    kept = {make_partial_folder(tmp_path / name).name for name in ("b", "a-step-", "a-step-3-step-4")}
    remove_partial_folders(tmp_path / "a", and_checkpoints=True)
    assert names(tmp_path) == kept


def test_remove_in_missing_folder_creates_nothing(tmp_path: Path) -> None:
    remove_partial_folders(tmp_path / "missing" / "a")
    assert not (tmp_path / "missing").exists()
