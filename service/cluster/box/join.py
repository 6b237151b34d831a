"""The box's side of joining a head: it authenticates the head by the code, then says its secret."""

import hashlib
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.service.cluster import Versions
from windlass.service.cluster.authority import JoinCode, fingerprint_of, make_box_request
from windlass.service.cluster.box.connection import (
    BoxFiles,
    HeadConnection,
    Membership,
    context_for,
    keep_membership,
    make_client,
    membership_of,
    told_errors,
)
from windlass.service.installation import (
    BOX_FILE,
    SETTINGS_FILE,
    Settings,
    find_serving,
    load_settings,
    node_of,
    prepare_home,
    told_new_ssd_dirs,
    write_setting,
)
from windlass.service.machine.fleet import facts_of_this_box, forget_link, stop_holding, taken_dir
from windlass.service.validation import ReportedError
from windlass.storage.files import write_durably

_DEFAULT_PORT = 8643
_SSD_DIRS = "ssd_dirs"
_SSD_DIRS_VARIABLE = "WINDLASS_SSD_DIRS"
_PLACEHOLDER = Path("/path/on/an/ssd")  # in the commands that a head prints
# In the folder of taken jobs, once the home has left: the fingerprint of the authority of the head that gave them.
_HEAD_FILE = "head"
# Set while a command runs again after it has installed the head's version, so that it does so once only.
_INSTALLED = "_WINDLASS_HEADS_VERSION_INSTALLED"

Tell = Callable[[str], None]


class JoinError(ReportedError):
    """This box cannot join. The message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """The facts about a head that the code vouches for."""

    url: str
    authority: str  # the certificate of its authority as PEM
    versions: Versions
    wheel_sha256: str | None


def url_of_head(head: str) -> str:
    """Returns the URL of HOST or HOST:PORT. Raises JoinError."""
    found = re.fullmatch(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?", head)
    port = int(found["port"] or _DEFAULT_PORT) if found else 0
    if found is None or not 1 <= port <= 65535:
        raise JoinError(f"--head: must be HOST:PORT, such as 192.168.1.10:{_DEFAULT_PORT}, got {head}")
    return f"https://{found['host']}:{port}"


def check_home(home: Path) -> None:
    """Raises JoinError if a home cannot join a head: it belongs to one already, or serves users itself."""
    membership = membership_of(home)
    if membership is not None:
        raise JoinError(f"{home} is box {membership.name} of {membership.head}; `windlass node leave` ends that first")
    if find_serving(home) is not None:
        raise JoinError(f"windlass is up in {home}; end it with `windlass down`, or give the box a home of its own")
    if (home / "cluster").exists():
        raise JoinError(f"{home} is a head itself, with boxes of its own; choose another home with --home")


def meet_head(url: str, code: JoinCode) -> HeadFacts:
    """Asks a head for its authority, and checks that it is the one that made the code.

    Nothing secret is said here, because the connection is not trusted yet. Raises JoinError and HeadUnreachable.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    answer = _ask(url, context)
    try:
        is_right = fingerprint_of(str(answer["authority"])) == code.fingerprint
    except (ValueError, KeyError):
        raise JoinError(f"{url} is no head of windlass; check --head") from None
    if not is_right:
        raise JoinError(f"{url} is not the head that made this code; check --head, and that nobody is between you")
    # Again, now with TLS that trusts this authority: so all of the answer is the head's.
    trusted = _ask(url, context_for(str(answer["authority"])))
    return HeadFacts(
        url=url,
        authority=str(answer["authority"]),
        versions=Versions.model_validate(trusted["versions"]),
        wheel_sha256=trusted["wheel_sha256"],
    )


def _ask(url: str, context: ssl.SSLContext) -> dict[str, Any]:
    with make_client(url, context) as client, told_errors(client):
        answer = client.get("/v1/node/ca")
    try:
        found = answer.json()
    except ValueError:
        found = None
    if answer.is_error or not isinstance(found, dict):
        raise JoinError(f"{url} is no head of windlass (status {answer.status_code}); check --head")
    return found


def match_versions(head: HeadFacts, tell: Tell) -> None:
    """Makes the versions equal to the head's.

    Another version of windlass is installed from the head, and the command runs again from its start: it does not
    return. Raises JoinError for other differences.
    """
    here = Versions.here()
    others = Versions(windlass=head.versions.windlass, torch=here.torch, ray=here.ray).differences(head.versions)
    if others:
        raise JoinError(
            f"this box has {'; '.join(others)}; results depend on these versions: run `{sys.executable} -m pip install "
            f"torch=={head.versions.torch.partition('+')[0]} ray=={head.versions.ray}`, then join again"
        )
    if here.windlass == head.versions.windlass:
        tell(f"windlass {here.windlass}, torch {here.torch} and Ray {here.ray} are the head's versions")
        return
    if os.environ.get(_INSTALLED):
        raise JoinError(f"windlass {here.windlass} runs still, after the head's {head.versions.windlass} was installed")
    tell(f"installing the head's windlass {head.versions.windlass} in the place of {here.windlass}")
    _install(head)
    os.environ[_INSTALLED] = "1"
    command = [sys.executable, "-c", "from windlass.service.cli import main; main()", *sys.argv[1:]]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _install(head: HeadFacts) -> None:
    if head.wheel_sha256 is None:
        raise JoinError(f"the head has no wheel of windlass {head.versions.windlass}; install that version here")
    if re.fullmatch(r"[A-Za-z0-9.+!_]{1,64}", head.versions.windlass) is None:  # it becomes the name of a file
        raise JoinError(f"the head's windlass has no version of the right form: {head.versions.windlass[:80]!r}")
    with tempfile.TemporaryDirectory(prefix="windlass-wheel-") as folder:
        path = Path(folder) / f"windlass-{head.versions.windlass}-py3-none-any.whl"
        digest = hashlib.sha256()
        with (
            HeadConnection.to(head.url, context_for(head.authority)) as connection,
            path.open("wb") as file,
            connection.stream("/v1/node/wheel") as answer,
        ):
            for block in answer.iter_bytes():
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != head.wheel_sha256:
            raise JoinError("the head's wheel did not arrive whole; join again")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["pip said nothing"]
            raise JoinError(f"the head's windlass {head.versions.windlass} could not be installed: {lines[-1]}")


@contextmanager
def settings_of_box(home: Path, ssd_dirs: Sequence[Path], tell: Callable[[str], None]) -> Iterator[Settings]:
    """Yields the settings of a box's home with its SSD directories, which are made and kept in the home's file.

    If the context ends with an error, the file is as before. `tell` gets a line for each directory that is made.
    Raises JoinError and SettingsError.
    """
    paths = tuple(path.expanduser().absolute() for path in ssd_dirs)
    if _PLACEHOLDER in paths:
        raise JoinError(f"{_PLACEHOLDER} stands for a folder on an SSD of this machine: put its path there")
    prepare_home(home)
    file = home / SETTINGS_FILE
    load_settings(home)  # tells what is wrong in the file
    before = file.read_text() if file.exists() else None
    if _SSD_DIRS not in tomllib.loads(before or "") and not os.environ.get(_SSD_DIRS_VARIABLE):
        listed = ", ".join(f'"{_escaped(path)}"' for path in paths)
        write_setting(home, _SSD_DIRS, f"[{listed}]", command="windlass node join")
    try:
        settings = load_settings(home)
        if settings.ssd_dirs != paths:
            told = ", ".join(map(str, settings.ssd_dirs))
            raise JoinError(
                f"{file} or the environment has ssd_dirs {told}; change them there, or give the same with --ssd"
            )
        for line in told_new_ssd_dirs(settings.ssd_dirs, settings.home):
            tell(line)
        settings.make_dirs()
        yield settings
    except BaseException:
        if before is None:
            file.unlink(missing_ok=True)
        else:
            write_durably(file, before)
        raise


def ask_to_join(settings: Settings, head: HeadFacts, code: JoinCode, name: str) -> Membership:
    """Makes this home a box of the head. Raises HeadRefused and HeadUnreachable."""
    key, request = make_box_request()
    message = {
        "secret": code.secret.hex(),
        "request": request,
        "name": name,
        "node": node_of(settings.home),
        "facts": facts_of_this_box(settings).model_dump(mode="json"),
    }
    with HeadConnection.to(head.url, context_for(head.authority)) as connection:
        answer = connection.post("/v1/node/join", message).json()
    _match_taken(settings.home, fingerprint_of(head.authority).hex())
    files = BoxFiles(settings.home)
    files.key.parent.mkdir(mode=0o700, exist_ok=True)
    for path, content in (
        (files.key, key.decode()),
        (files.certificate, answer["certificate"]),
        (files.authority, head.authority),
    ):
        write_durably(path, content, mode=0o600)
    membership = Membership(head=head.url, box_id=answer["box_id"], name=answer["name"])
    keep_membership(settings.home, membership)
    return membership


def has_been_heard(home: Path) -> bool:
    """Returns whether the head has had a report of this box since it joined. Raises as HeadConnection's methods."""
    with HeadConnection.of_box(home) as connection:
        return bool(connection.get("/v1/node/self").json()["has_reported"])


def leave_head(home: Path) -> None:
    """Tells the head that this box leaves. Raises as HeadConnection's methods."""
    with HeadConnection.of_box(home) as connection:
        connection.post("/v1/node/leave", {})


def forget_head(home: Path) -> None:
    """Removes the home's right to call its head. The home's dispatcher, if it runs, holds no attempts any more."""
    files = BoxFiles(home)
    if (head := _head_of_taken(home)) is not None and taken_dir(home).is_dir():
        write_durably(taken_dir(home) / _HEAD_FILE, head)
    forget_link(home)
    for path in (home / BOX_FILE, files.key, files.certificate, files.authority):
        path.unlink(missing_ok=True)
    stop_holding(home)


def _match_taken(home: Path, head: str) -> None:
    """Sets the list of taken jobs aside if it is of another head, so that this one does not get that head's jobs.

    `head`: the fingerprint of the head's authority. Its own list, if it was set aside before, is used again.
    """
    taken, before = taken_dir(home), _head_of_taken(home)
    if before == head:
        return
    if taken.is_dir():
        taken.rename(_aside(home, before or f"unknown-{time.time_ns()}"))
    if _aside(home, head).is_dir():
        _aside(home, head).rename(taken)


def _head_of_taken(home: Path) -> str | None:
    """Returns the fingerprint of the authority whose jobs are listed as taken; None: not known."""
    try:
        authority = BoxFiles(home).authority
        if authority.exists():
            return fingerprint_of(authority.read_text()).hex()
        return (taken_dir(home) / _HEAD_FILE).read_text()
    except (OSError, ValueError):
        return None


def _aside(home: Path, head: str) -> Path:
    return home / f"{taken_dir(home).name}-{head}"


def _escaped(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')
