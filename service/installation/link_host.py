"""The address at which other boxes reach this one for jobs over several boxes."""

from pathlib import Path

from windlass.service.installation.addresses import is_one_address
from windlass.service.installation.home import box_of
from windlass.service.installation.settings import Settings
from windlass.storage.files import write_durably


def link_host_of(settings: Settings) -> str | None:
    """Returns the address; None: not known. A head has no cluster_host then, or a box has not called its head yet."""
    if settings.link_host is not None:
        return settings.link_host
    if box_of(settings.home) is None:
        return settings.cluster_host
    try:
        return noted_link_host(settings.home).read_text().strip() or None
    except OSError:
        return None


def note_link_host(home: Path, host: str) -> None:
    """Stores the address from which a box calls its head, for `link_host_of`. Raises OSError."""
    path = noted_link_host(home)
    if is_one_address(host) and not (path.exists() and path.read_text().strip() == host):
        write_durably(path, f"{host}\n")


def noted_link_host(home: Path) -> Path:
    """Returns the file with the address from which a box calls its head."""
    return home / "box" / "link_host"
