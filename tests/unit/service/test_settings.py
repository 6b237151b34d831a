"""Settings come from the environment, the file and defaults, in this order; errors say where from."""

from pathlib import Path

import pytest

from windlass.service.settings import SettingsError, load_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("HOME", "HOST", "PORT", "SSD_DIRS", "MODELS_DIR", "DATABASE_URL", "RAY_ADDRESS", "MAX_FILE_MIB"):
        monkeypatch.delenv(f"WINDLASS_{key}", raising=False)


def test_defaults_lie_in_the_home(tmp_path: Path) -> None:
    settings = load_settings(tmp_path)
    assert (settings.host, settings.port, settings.base_url) == ("127.0.0.1", 8642, "http://127.0.0.1:8642")
    assert settings.database_url == f"sqlite:///{tmp_path}/windlass.db"
    assert settings.ssd_dirs == (tmp_path / "ssd0", tmp_path / "ssd1")
    assert settings.models_dir == tmp_path / "models"
    settings.make_dirs()
    for path in (settings.files_dir, settings.jobs_dir, settings.fine_tuned_dir, *settings.ssd_dirs):
        assert path.stat().st_mode & 0o777 == 0o700


def test_the_environment_names_the_home_and_wins_over_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "windlass.toml").write_text('port = 9000\nmax_file_mib = 7\nssd_dirs = ["/a", "/b", "/c"]\n')
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path))
    monkeypatch.setenv("WINDLASS_PORT", "9001")
    settings = load_settings()
    assert (settings.home, settings.port, settings.max_file_nbytes) == (tmp_path, 9001, 7 * 1024**2)
    assert settings.ssd_dirs == (Path("/a"), Path("/b"), Path("/c"))
    monkeypatch.setenv("WINDLASS_SSD_DIRS", "/mnt/x, /mnt/y")
    assert load_settings().ssd_dirs == (Path("/mnt/x"), Path("/mnt/y"))


def test_an_argument_names_the_home_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_HOME", "/elsewhere")
    assert load_settings(tmp_path).home == tmp_path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("port = 99999", "port = 99999: Input should be less than or equal to 65535"),
        ('port = "x"', "port = 'x': Input should be a valid integer"),
        ('host = "0.0.0.0"', "host = '0.0.0.0': must be a loopback address"),
        ('database_url = "mysql://h/d"', "database_url = 'mysql://h/d': must be one of sqlite, postgresql"),
        ('database_url = "windlass.db"', "database_url = 'windlass.db': Could not parse SQLAlchemy URL"),
        ("max_file_mib = 0", "max_file_mib = 0: Input should be greater than or equal to 1"),
        ("prot = 1", "prot = 1: there is no such setting; there are database_url, "),
        ('home = "/x"', "home = '/x': there is no such setting"),
        ('ssd_dirs = ["ssd"]', "must be absolute paths, got 'ssd'"),
        ('ssd_dirs = ["/a", "/a"]', "at least one directory and none twice"),
        ("ssd_dirs = []", "at least one directory and none twice"),
        ("port = ", "cannot be read: Invalid value"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "windlass.toml"
    file.write_text(line + "\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_errors_name_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_PORT", "many")
    with pytest.raises(SettingsError, match="environment: WINDLASS_PORT = 'many': Input should be a valid integer"):
        load_settings(tmp_path)
