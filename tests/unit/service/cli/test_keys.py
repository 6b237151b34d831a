"""Keys on the command line: created, listed, revoked. Only their digests are stored."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.api_client import context_of, serve
from windlass.service.api.authentication import LOGIN_COOKIE
from windlass.service.auth.exposure import UnprotectedError, prepare_database
from windlass.service.cli import keys as cli_keys
from windlass.service.cli.errors import CommandError
from windlass.service.installation.client import RequestRefusedError, ServiceClient
from windlass.service.installation.home import HomeError
from windlass.service.installation.local_key import kept_key, local_key, open_client
from windlass.service.installation.settings import KEY_VARIABLE, Settings
from windlass.storage.sql.database import Database
from windlass.storage.sql.models import ApiKey
from windlass.storage.sql.repositories.api_keys import KeyRepository


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return tmp_path / "home"


def make_key(home: Path, capsys: pytest.CaptureFixture[str], name: str = "ann", **options: Any) -> str:
    """A key's secret, which is the only text on standard output."""
    capsys.readouterr()
    cli_keys.create(name=name, home=home, **options)
    out: str = capsys.readouterr().out
    return out.removesuffix("\n")


def keys_of(home: Path) -> list[ApiKey]:
    database = Database(f"sqlite:///{home}/windlass.db")
    try:
        with database.read() as session:
            return list(KeyRepository(session).all())
    finally:
        database.close()


def test_the_first_key_comes_with_one_for_this_machines_command_line(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = [make_key(home, capsys, "ann"), make_key(home, capsys, "ben", user="team", role="admin")]
    kept = kept_key(home)
    assert kept is not None
    assert all(secret.startswith("wk-") and len(secret) == 46 for secret in (*secrets, kept))
    assert len({*secrets, kept}) == 3
    assert (home / "cli.key").stat().st_mode & 0o777 == 0o600
    assert [(key.name, key.user, key.role, key.expires_at) for key in keys_of(home)] == [
        ("ann", "ann", "user", None),
        ("cli", "cli", "admin", None),
        ("ben", "team", "admin", None),
    ]
    cli_keys.list_(home)
    listed = capsys.readouterr().out
    assert [line.split()[1:5] for line in listed.splitlines()[1:]] == [
        ["ann", "ann", "user", "active"],
        ["cli", "cli", "admin", "active"],
        ["ben", "team", "admin", "active"],
    ]


def test_invalid_local_key_is_recreated(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(home, capsys)
    old = kept_key(home)
    cli_keys.revoke(keys_of(home)[1].id, home)
    make_key(home, capsys)
    assert kept_key(home) not in (None, old)


@pytest.mark.parametrize(("expires", "seconds"), [("12h", 43200), ("90d", 7776000), ("4w", 2419200), ("1y", 31536000)])
def test_keys_expire(home: Path, capsys: pytest.CaptureFixture[str], expires: str, seconds: int) -> None:
    make_key(home, capsys, expires=expires)
    key = keys_of(home)[0]
    assert key.expires_at is not None
    assert key.expires_at - key.created_at == pytest.approx(seconds, abs=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expires": "90"}, "--expires takes a number with h, d, w or y, such as 90d, got '90'"),
        ({"expires": "0d"}, "--expires takes"),
        ({"role": "root"}, "--role is admin or user, got 'root'"),
        ({"name": ""}, "--name takes 1 to 64 letters"),
        ({"user": "a\nb"}, "--user takes 1 to 64 letters"),
        ({"user": "x" * 65}, "--user takes 1 to 64 letters"),
    ],
)
def test_create_key_with_invalid_options_is_refused(home: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        cli_keys.create(**({"name": "ann", "home": home} | options))  # type: ignore[arg-type]
    assert not (home / "cli.key").exists()


def test_a_key_that_is_not_there_is_not_revoked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(home, capsys)
    with pytest.raises(CommandError, match="there is no key 'key-0'"):
        cli_keys.revoke("key-0", home)


def test_a_misspelt_key_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(home, capsys)
    key, _ = keys_of(home)
    with pytest.raises(CommandError, match=f"; did you mean {key.id}"):
        cli_keys.revoke(f"{key.id}0", home)


def test_the_audit_tells_who_made_and_revoked_keys(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(home, capsys)
    key, cli = keys_of(home)
    cli_keys.revoke(key.id, home)
    capsys.readouterr()
    cli_keys.audit(limit=10, home=home)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[4], row[5], row[-1]) for row in rows] == [
        ("revoke_key", key.id, "done"),
        ("create_key", cli.id, "done"),
        ("create_key", key.id, "done"),
    ]


def test_the_last_key_opens_the_service_to_this_machine_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(home, capsys)
    for key in keys_of(home):
        assert "it was the last one" not in capsys.readouterr().out
        cli_keys.revoke(key.id, home)
    assert "it was the last one: the service answers to this machine only" in capsys.readouterr().out


def test_the_command_lines_key_is_of_the_environment_or_of_the_home(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(mode=0o700)
    assert local_key(home) is None
    make_key(home, capsys)
    assert local_key(home) == kept_key(home)
    monkeypatch.setenv(KEY_VARIABLE, "wk-mine")
    assert local_key(home) == "wk-mine"
    monkeypatch.delenv(KEY_VARIABLE)
    (home / "cli.key").chmod(0o640)
    with pytest.raises(HomeError, match="others may read the key"):
        local_key(home)


def test_the_client_shows_its_key(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(home, capsys)
    settings = Settings(home=home)
    with serve(settings) as app, open_client(settings) as client, ServiceClient(settings.base_url) as stranger:
        for each in (client, stranger):
            app.headers = each._http.headers
            each._http = app
        app.headers = {"Authorization": f"Bearer {kept_key(home)}"}
        assert client.jobs() == []
        app.headers = {}
        with pytest.raises(RequestRefusedError, match="an API key is needed"):
            stranger.jobs()


def test_up_for_others_says_how_to_make_a_key(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(home=home, host="0.0.0.0")
    with pytest.raises(UnprotectedError, match=r"\(host is 0.0.0.0\).*`windlass keys create --name NAME --role admin`"):
        prepare_database(settings)
    make_key(home, capsys)
    prepare_database(settings)


def test_no_secret_is_kept_or_told(
    home: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither secrets of valid, wrong or revoked keys, nor of logins, are in any file, log or answer."""
    caplog.set_level(logging.DEBUG)
    good, revoked = make_key(home, capsys, "ann"), make_key(home, capsys, "ben", role="admin")
    wrong, kept = "wk-" + "w" * 43, kept_key(home)
    assert kept is not None
    settings = Settings(home=home)
    secrets, answers = {good, revoked, wrong, kept}, []
    with serve(settings) as client:
        origin = {"Origin": settings.base_url}
        for secret in (good, revoked, wrong, kept):
            for path in ("/v1/fine_tuning/jobs", "/v1/audit", "/v1/none", "/v1/files?limit=x"):
                answers.append(client.get(path, headers={"Authorization": f"Bearer {secret}"}).text)
            answers.append(client.post("/login", data={"key": secret}, headers=origin).text)
            secrets |= {token for token in [client.cookies.get(LOGIN_COOKIE)] if token}
            client.cookies.clear()
        cli_keys.revoke(next(key.id for key in keys_of(home) if key.name == "ben"), home)
        answers.append(client.get("/v1/audit", headers={"Authorization": f"Bearer {revoked}"}).text)
        answers.append(client.get("/v1/audit", headers={"Authorization": f"Bearer {kept}"}).text)
        assert context_of(client).database is not None
        files = {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and path.name != "cli.key"}
    assert len(secrets) == 7  # three of them are logins
    capsys.readouterr()
    cli_keys.list_(home)
    cli_keys.audit(limit=100, home=home)
    told = [caplog.text, capsys.readouterr().out, *answers]
    assert any(path.name == "windlass.db" for path in files)
    for secret in secrets:
        assert [path for path, content in files.items() if secret.encode() in content] == []
        assert [text for text in told if secret in text] == []


def test_a_keys_limits_are_made_changed_listed_and_reset(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(home, capsys, "ann", max_running_jobs=2)
    key_id = keys_of(home)[0].id
    cli_keys.limit(key_id, most_urgent_priority=-5, max_stored_gib=0.5, home=home)
    assert keys_of(home)[0].limits == {"max_running_jobs": 2, "most_urgent_priority": -5, "max_stored_gib": 0.5}
    told = "max running jobs 2, most urgent priority -5, max stored gib 0.5"
    assert capsys.readouterr().out == f"{key_id}: {told}\n"
    cli_keys.list_(home)
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].endswith("limits")
    assert listed[1].endswith(told)
    cli_keys.limit(key_id, max_waiting_jobs=0, reset=True, home=home)
    assert keys_of(home)[0].limits == {"max_waiting_jobs": 0}
    cli_keys.limit(key_id, reset=True, home=home)
    assert keys_of(home)[0].limits is None


def test_wrong_limits_change_nothing_and_name_the_option(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key(home, capsys)
    key_id = keys_of(home)[0].id
    with pytest.raises(CommandError, match="--max-running-jobs: must be greater than or equal to 1, got 0"):
        cli_keys.limit(key_id, max_running_jobs=0, home=home)
    with pytest.raises(CommandError, match="there is no key 'key-x'"):
        cli_keys.limit("key-x", max_running_jobs=1, home=home)
    assert keys_of(home)[0].limits is None
