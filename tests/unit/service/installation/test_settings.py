"""Settings come from the environment, the file and defaults, in this order. Errors name the source."""

import os
import stat
from pathlib import Path

import pytest

from windlass.actors.lifecycle.cpu_affinity import numa_nodes
from windlass.service.installation.link_host import link_host_of, note_link_host
from windlass.service.installation.settings import Settings, SettingsError, is_device_path, load_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in Settings.model_fields:
        monkeypatch.delenv(f"WINDLASS_{key.upper()}", raising=False)


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
        ("port = 99999", "port = 99999: must be less than or equal to 65535"),
        ('port = "x"', "port = 'x': must be a whole number"),
        ('host = "box"', "host = 'box': must be an IP address"),
        ('database_url = "mysql://h/d"', "database_url = 'mysql://h/d': must be one of sqlite, postgresql"),
        ('database_url = "postgres://u:p@ss/w@h:5432/d"', "database_url = 'postgres://u:***@h:5432/d': must be one of"),
        (
            'database_url = "pg://h:5432/d?password=x&a=b"',
            "database_url = 'pg://h:5432/d?password=***&a=b': must",
        ),
        ('database_ur = "postgresql://u:p@h"', "database_ur = 'postgresql://u:***@h': there is no such setting"),
        ('database_url = "windlass.db"', "database_url = 'windlass.db': Could not parse SQLAlchemy URL"),
        ("max_file_mib = 0", "max_file_mib = 0: must be greater than or equal to 1"),
        ("prot = 1", "prot = 1: there is no such setting; did you mean port?"),
        ("mfm = 1", "mfm = 1: there is no such setting; did you mean max_file_mib?"),
        (
            "nonsense = 1",
            "nonsense = 1: there is no such setting; there are box_lease_minutes, cluster_host, cluster_port, ",
        ),
        ('home = "/x"', "home = '/x': there is no such setting"),
        ('ssd_dirs = ["ssd"]', "ssd_dirs = ['ssd']: must be absolute paths, got 'ssd'"),
        ('ssd_dirs = ["/a", "/a"]', "ssd_dirs = ['/a', '/a']: /a is the same place as /a"),
        ("ssd_dirs = []", "ssd_dirs = []: must name at least one directory or block device"),
        ('ssd_dirs = ["/dev/null"]', "ssd_dirs = ['/dev/null']: /dev/null is a character device"),
        ('models_dir = "models"', "models_dir must be an absolute path, got 'models'"),
        ("ssd_endurance_tbw = 0", "ssd_endurance_tbw = 0: must be greater than 0"),
        ("ssd_endurance_tbw = [600, inf]", "ssd_endurance_tbw = inf: must be a finite number"),
        ('ssd_endurance_tbw = "much"', "ssd_endurance_tbw = 'much': must be a number"),
        (
            "ssd_endurance_tbw = [1, 2, 3]",
            "ssd_endurance_tbw = [1, 2, 3]: must be one number, or one for each of the 2 entries of ssd_dirs, got 3",
        ),
        ("host_memory_gib = inf", "host_memory_gib = inf: must be a finite number"),
        ("num_cpu_optimizers = 0", "num_cpu_optimizers = 0: must be greater than or equal to 1"),
        ("num_cpu_optimizers = 5", "num_cpu_optimizers = 5: must be at most 4, the cores that windlass may use here"),
        ("compute_threads = 5", "compute_threads = 5: must be at most 4, the cores that windlass may use here"),
        ("optimizer_threads = 5", "optimizer_threads = 5: must be at most 4, the cores that windlass may use here"),
        ("compute_threads = 1.5", "compute_threads = 1.5: must be a whole number"),
        (
            "num_cpu_optimizers = 3\noptimizer_threads = 2",
            "optimizer_threads = 2: num_cpu_optimizers 3 x optimizer_threads 2 = 6 threads on 4 cores; lower one",
        ),
        ('link_host = "box"', "link_host = 'box': must be one IP address of this machine that the other boxes reach"),
        ('link_host = "0.0.0.0"', "link_host = '0.0.0.0': must be one IP address of this machine"),
        ('link_host = "fe80::1%eth0"', "must be one IP address of this machine"),
        ('link_ports = "7719-7700"', "link_ports = '7719-7700': must be a range of ports, such as 7700-7719"),
        ('link_ports = "0-70"', "must be a range of ports, such as 7700-7719"),
        ("link_ports = 70000", "link_ports = 70000: must be a range of ports, such as 7700-7719"),
        ('host_names = ["https://box"]', "must be names such as box.example.org, without scheme and port, got 'https"),
        ('host_names = "box:8642"', "without scheme and port, got 'box:8642'"),
        ('trusted_proxies = "*"', "must be addresses, or networks such as 10.0.0.0/24, got '*'"),
        ('tls_key = "/none"', "must be the absolute path of a file that you may read"),
        ('tls_certificate = "/etc/hostname"', "tls_certificate and tls_key go together; give both or none"),
        ("port = ", "cannot be read: Invalid value"),
    ],
)
def test_errors_name_file_key_and_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setattr("windlass.service.installation.settings.num_cores", lambda: 4)
    file = tmp_path / "windlass.toml"
    file.write_text(line + "\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_a_key_that_anybody_may_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("")
    key.chmod(0o644)
    (tmp_path / "windlass.toml").write_text(f'tls_key = "{key}"\n')
    with pytest.raises(SettingsError, match=f"anybody may read it; run `chmod 600 {key}`"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8642"),
        ("::", "http://[::1]:8642"),
        ("192.168.1.5", "http://192.168.1.5:8642"),
        ("fd00::5", "http://[fd00::5]:8642"),
    ],
)
def test_local_url_of_public_service_is_reachable(tmp_path: Path, host: str, url: str) -> None:
    settings = Settings(home=tmp_path, host=host)
    assert (settings.base_url, settings.is_for_others) == (url, True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"host": "::1"}, None),
        ({"host": "localhost"}, None),
        ({"host": "0.0.0.0"}, "host is 0.0.0.0"),
        ({"host_names": "a.example, B.example"}, "host_names is a.example, b.example"),
        ({"trusted_proxies": "127.0.0.1"}, "trusted_proxies is 127.0.0.1"),
    ],
)
def test_settings_that_make_the_service_public_are_named(
    tmp_path: Path, change: dict[str, str], why: str | None
) -> None:
    assert Settings(home=tmp_path, **change).why_for_others == why  # type: ignore[arg-type]


def test_errors_name_the_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_PORT", "many")
    with pytest.raises(SettingsError, match="environment: WINDLASS_PORT = 'many': must be a whole number"):
        load_settings(tmp_path)


def test_threads_may_take_every_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.service.installation.settings.num_cores", lambda: 4)
    default = load_settings(tmp_path)
    assert (default.num_cpu_optimizers, default.optimizer_threads, default.compute_threads) == (
        len(numa_nodes()),
        None,
        None,
    )
    (tmp_path / "windlass.toml").write_text("num_cpu_optimizers = 2\noptimizer_threads = 2\ncompute_threads = 4\n")
    asked = load_settings(tmp_path)
    assert (asked.num_cpu_optimizers, asked.optimizer_threads, asked.compute_threads) == (2, 2, 4)
    monkeypatch.setenv("WINDLASS_COMPUTE_THREADS", "8")
    with pytest.raises(SettingsError, match="environment: WINDLASS_COMPUTE_THREADS = '8': must be at most 4"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"compute_threads": 7}, None),
        ({"compute_threads": 4, "optimizer_threads": 2, "num_cpu_optimizers": 2}, None),
        (
            {"compute_threads": 8},
            "compute_threads = 8: num_cpu_optimizers 1 x optimizer_threads 1 + compute_threads 8 = 9 threads on 8 c",
        ),
        ({"num_cpu_optimizers": 8}, "num_cpu_optimizers 8 x optimizer_threads 1 + compute_threads 1 = 9 threads"),
        (
            {"compute_threads": 5, "optimizer_threads": 4},
            "optimizer_threads = 4: num_cpu_optimizers 1 x optimizer_threads 4 + compute_threads 5 = 9 threads",
        ),
        (
            {"compute_threads": 4, "optimizer_threads": 3, "num_cpu_optimizers": 2},
            "x optimizer_threads 3 + compute_threads 4 = 10 threads",
        ),
    ],
)
def test_all_threads_of_a_job_fit_the_cores_where_these_are_enough_to_divide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], message: str | None
) -> None:
    monkeypatch.setattr("windlass.service.installation.settings.num_cores", lambda: 8)
    monkeypatch.setattr("windlass.service.installation.settings.numa_nodes", lambda: [frozenset(range(8))])
    (tmp_path / "windlass.toml").write_text("".join(f"{key} = {value}\n" for key, value in asked.items()))
    if message is None:
        assert {key: getattr(load_settings(tmp_path), key) for key in asked} == asked
        return
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WINDLASS_PROT", "environment: WINDLASS_PROT: there is no such setting; did you mean WINDLASS_PORT?"),
        ("windlass_host_name", "windlass_host_name: there is no such setting; did you mean WINDLASS_HOST_NAMES?"),
        ("WINDLASS_APIKEY", "environment: WINDLASS_APIKEY: there is no such setting; did you mean WINDLASS_API_KEY?"),
    ],
)
def test_variable_misspelt_is_refused_with_the_setting_that_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path)
    assert message in str(caught.value)
    monkeypatch.setenv(name, "")
    load_settings(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "WINDLASS_API_KEY",
        "WINDLASS_OF_ANOTHER_PROGRAM",
        "windlass_login_hours",
        # Variables that Kubernetes sets for a service named windlass.
        "WINDLASS_SERVICE_HOST",
        "WINDLASS_SERVICE_PORT",
        "WINDLASS_SERVICE_PORT_HTTP",
        "WINDLASS_PORT_8642_TCP",
        "WINDLASS_PORT_8642_TCP_ADDR",
        "WINDLASS_PORT_8642_TCP_PORT",
        "WINDLASS_PORT_8642_TCP_PROTO",
    ],
)
def test_variable_that_is_no_misspelt_setting_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "7")
    load_settings(tmp_path)


def test_a_file_is_no_place_for_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"/a,{file}")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path)
    assert str(caught.value).startswith("environment: WINDLASS_SSD_DIRS = '/a,/")
    assert f": {file} is a regular file; name a directory on an SSD" in str(caught.value)
    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"{file}/below")
    with pytest.raises(SettingsError, match="below cannot be looked at: Not a directory"):
        load_settings(tmp_path)


def test_one_directory_under_two_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"{tmp_path}/disk/a,{tmp_path}/link/a")
    with pytest.raises(SettingsError, match=r"link/a is the same place as .*/disk/a; name each SSD once"):
        load_settings(tmp_path)
    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"{tmp_path}/disk/a,{tmp_path}/link/b")
    assert len(load_settings(tmp_path).ssd_dirs) == 2


def test_unusable_ssd_directory_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_SSD_DIRS", "/proc/windlass-test")
    with pytest.raises(SettingsError, match=r"^ssd_dirs: /proc/windlass-test cannot be made \(.+\); name a directory"):
        load_settings(tmp_path).make_dirs()
    monkeypatch.setenv("WINDLASS_SSD_DIRS", str(tmp_path / "ssd"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(SettingsError, match=f"^ssd_dirs: you may not write to {tmp_path}/ssd; change its owner, or"):
        load_settings(tmp_path).make_dirs()


def test_no_directory_is_made_in_place_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if the device exists nor if it is missing, with or without a link to it."""
    missing, link = Path("/dev/windlass-test-missing"), tmp_path / "drive"
    link.symlink_to(missing)
    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"{tmp_path}/ssd,{link}")
    settings = load_settings(tmp_path)
    settings.make_dirs()
    assert (tmp_path / "ssd").is_dir()
    assert not os.path.lexists(missing)
    assert is_device_path(missing)
    assert is_device_path(Path("/dev/disk/by-id/nvme-none"))
    assert not is_device_path(Path("/dev/shm/ssd"))  # memory, for experiments


def test_a_block_device_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = next((path for path in sorted(Path("/dev").iterdir()) if path.is_block_device()), None)
    if device is None:
        pytest.skip("this machine shows no block device in /dev")
    node = tmp_path / "node"  # outside /dev, as in containers
    try:
        os.mknod(node, stat.S_IFBLK | 0o600, device.stat().st_rdev)
    except PermissionError:
        node.symlink_to(device)
    monkeypatch.setenv("WINDLASS_SSD_DIRS", str(node))
    settings = load_settings(tmp_path)
    settings.make_dirs()
    assert settings.ssd_dirs == (node,)
    assert is_device_path(node)
    assert node.is_block_device()


@pytest.mark.parametrize(
    ("line", "variable", "expected"),
    [
        ("", None, ()),
        ("ssd_endurance_tbw = 600", None, (600e12, 600e12)),
        ("ssd_endurance_tbw = [600, 1.5]", None, (600e12, 1.5e12)),
        ("ssd_endurance_tbw = 600", "1200", (1200e12, 1200e12)),
        ("", "600, 1200.5", (600e12, 1200.5e12)),
    ],
)
def test_ratings_are_for_all_ssds_or_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, variable: str | None, expected: tuple[float, ...]
) -> None:
    (tmp_path / "windlass.toml").write_text(line)
    if variable is not None:
        monkeypatch.setenv("WINDLASS_SSD_ENDURANCE_TBW", variable)
    assert load_settings(tmp_path).ssd_endurance_nbytes == expected


@pytest.mark.parametrize(
    ("line", "ports"),
    [("", None), ('link_ports = "7700-7719"', range(7700, 7720)), ("link_ports = 7700", range(7700, 7701))],
)
def test_link_ports_are_a_range(tmp_path: Path, line: str, ports: range | None) -> None:
    (tmp_path / "windlass.toml").write_text(line)
    assert load_settings(tmp_path).link_port_range == ports


def test_link_host_of_a_head_is_its_cluster_host_unless_it_is_set(tmp_path: Path) -> None:
    assert link_host_of(Settings(home=tmp_path)) is None
    assert link_host_of(Settings(home=tmp_path, cluster_host="10.0.0.1")) == "10.0.0.1"
    assert link_host_of(Settings(home=tmp_path, cluster_host="10.0.0.1", link_host="10.9.0.1")) == "10.9.0.1"


def test_link_host_of_a_box_is_the_address_that_it_calls_from_unless_it_is_set(tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box.json").write_text('{"name": "attic", "head": "https://10.0.0.1:8643", "box_id": "box-1"}')
    assert link_host_of(Settings(home=tmp_path)) is None
    for noted, host in (("10.0.0.2", "10.0.0.2"), ("fe80::1%eth0", "10.0.0.2"), ("10.0.0.3", "10.0.0.3")):
        note_link_host(tmp_path, noted)
        assert link_host_of(Settings(home=tmp_path)) == host
    assert link_host_of(Settings(home=tmp_path, link_host="10.9.0.1")) == "10.9.0.1"
