"""The API key of this machine's command line: in the environment, or in a private file of the home."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from windlass.service.installation.client import ServiceClient
from windlass.service.installation.home import HomeError, Serving, box_of, find_killed, find_serving
from windlass.service.installation.settings import KEY_VARIABLE, Settings

KEY_FILE = "cli.key"


def open_client(settings: Settings) -> ServiceClient:
    """Makes a client of the home's service, with the local API key.

    Raises HomeError if other users may read the key, or if the home is a box's, which has no API.
    """
    if (box := box_of(settings.home)) is not None:
        raise HomeError(f"this home is box {box.name} of the service at {box.head}; type this command on the head")
    # A service started with --port answers there, whatever the settings say. For a killed service no other address is
    # tried, because another home's service may answer there.
    serving = find_serving(settings.home)
    killed = find_killed(settings.home) if serving is None else None
    recorded = serving or killed
    url = settings.base_url if recorded is None else recorded.url
    certificate = settings.tls_certificate if url.startswith("https:") else None
    key = local_key(settings.home)
    if killed is None:
        return ServiceClient(url, api_key=key, certificate=certificate)
    return ServiceClient(url, api_key=key, certificate=certificate, if_away=f", {told_killed(settings, killed)}")


def told_killed(settings: Settings, killed: Serving) -> str:
    """Returns the second half of a sentence about a killed service: its state, and the command to start it."""
    port = urlsplit(killed.url).port
    option = "" if port == settings.port else f" --port {port}"
    return (
        f"where the service of {settings.home} was (process {killed.process.pid}) until it was killed or crashed; "
        f"start it with `windlass up --detach{option}`"
    )


def local_key(home: Path) -> str | None:
    """Returns the key to use, or None."""
    return os.environ.get(KEY_VARIABLE, "").strip() or kept_key(home)


def kept_key(home: Path) -> str | None:
    """Returns the key in the home's file, or None. Raises HomeError if other users may read the file."""
    file = home / KEY_FILE
    try:
        if file.stat().st_mode & 0o077:
            raise HomeError(f"others may read the key in {file}; revoke it, or run `chmod 600 {file}`")
        return file.read_text().strip() or None
    except FileNotFoundError:
        return None


def keep_local_key(home: Path, secret: str) -> Path:
    """Writes the key's file, readable only by its owner. It replaces an existing file."""
    file = home / KEY_FILE
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as target:
        target.write(f"{secret}\n")
    partial.replace(file)
    return file
