"""The settings of a home that becomes a box: its SSD directories are kept, unless it does not join."""

from pathlib import Path

import pytest

from windlass.service.cluster.box.join import JoinError, settings_of_box
from windlass.service.installation.settings import load_settings


@pytest.mark.parametrize("own", [None, "host_memory_gib = 2\n", "# mine\n"])
def test_ssd_dirs_are_kept_beside_what_the_file_has(tmp_path: Path, own: str | None) -> None:
    home, ssd = tmp_path / "home", tmp_path / "ssd"
    home.mkdir(mode=0o700)
    if own is not None:
        (home / "windlass.toml").write_text(own)
    told: list[str] = []
    with settings_of_box(home, [ssd], told.append) as settings:
        assert settings.ssd_dirs == (ssd,)
    assert load_settings(home).ssd_dirs == (ssd,)
    if own is not None:
        assert (home / "windlass.toml").read_text().endswith(own)
    with settings_of_box(home, [ssd], told.append):  # again, after a cut
        pass
    assert [line.partition(" does not exist")[0] for line in told] == [f"! ssd_dirs: {ssd}"], "it may be a wrong disk"


@pytest.mark.parametrize("own", [None, "host_memory_gib = 2\n"])
def test_box_that_does_not_join_keeps_its_file_as_it_was(tmp_path: Path, own: str | None) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    file = home / "windlass.toml"
    if own is not None:
        file.write_text(own)
    with pytest.raises(RuntimeError), settings_of_box(home, [tmp_path / "ssd"], print):
        raise RuntimeError("the code was used before")
    assert (file.read_text() if file.exists() else None) == own
    with settings_of_box(home, [tmp_path / "other"], print) as settings:
        assert settings.ssd_dirs == (tmp_path / "other",)


def test_other_ssd_dirs_in_the_file_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "windlass.toml").write_text(f'ssd_dirs = ["{tmp_path / "old"}"]\n')
    with pytest.raises(JoinError, match="change them there"), settings_of_box(home, [tmp_path / "new"], print):
        pass


def test_the_placeholder_of_the_printed_command_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(JoinError, match="put its path there"),
        settings_of_box(tmp_path / "home", [Path("/path/on/an/ssd")], print),
    ):
        pass
    assert not (tmp_path / "home").exists()
