"""A box's end of links to other boxes: its name there, its address, a port of it, and its certificate."""

import socket
from contextlib import ExitStack
from pathlib import Path

from windlass.service.installation import box_of, noted_link_host
from windlass.service.validation import ReportedError
from windlass.storage.ids import HEAD_NAME, BoxName
from windlass.storage.link import Certificates

_ID_CHARS = 8
_CERTIFICATE = "link.pem"  # with its key


class LinkPortError(ReportedError):
    """No port is free at which this box could listen for a job over several boxes. Later one may be."""


def link_name(name: str, box_id: str) -> BoxName:
    """Returns the name of a box in its link's certificate, and in a job over several boxes.

    A part of its id is in it, because a box may leave, and another one join under its name: the old certificate must
    not pass for the new box. `box_id`: of the box's row in the head's database.
    """
    return BoxName(f"{name}@{box_id.removeprefix('box-')[:_ID_CHARS]}")


def link_name_of_head() -> BoxName:
    """Returns the name of a head on links. No other box can have it."""
    return BoxName(HEAD_NAME)


def link_certificates(home: Path) -> Certificates:
    """Returns the files that prove on links which box this home is. They may not be there yet; see `link_files`."""
    folder = home / ("cluster" if box_of(home) is None else "box")  # a head's, or a box's
    return Certificates(certificate=folder / _CERTIFICATE, authority=folder / "authority.pem")


def link_files(home: Path) -> Certificates | None:
    """Returns the files that prove on links which box this home is; None: there are none yet.

    The certificate is renewed in time, and the file replaced as a whole. A link reads it once, when it starts.
    """
    files = link_certificates(home)
    return files if files.certificate.is_file() and files.authority.is_file() else None


def forget_link(home: Path) -> None:
    """Removes the certificate and the address of a box that leaves its head."""
    for path in (home / "box" / _CERTIFICATE, noted_link_host(home)):
        path.unlink(missing_ok=True)


def reserve_link_port(host: str, ports: range | None) -> socket.socket:
    """Returns a socket that keeps a free port of an address, so that nothing else takes it, but does not listen.

    `storage.link.listen` listens at the port beside it, also in another process. The caller closes the socket after
    that, or when the attempt has ended. `ports`: see `Settings.link_port_range`; None: any that is free.

    Raises:
        LinkPortError: all are in use, or the address is none of this box.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    why: OSError | None = None
    for port in (0,) if ports is None else ports:
        with ExitStack() as failed:
            reserved = failed.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                reserved.bind((host, port))
            except OSError as error:
                why = error
                continue
            # Only now: before, the port of another reservation would count as free. From now on a socket with the same
            # option may listen at it, as that of the link does.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            failed.pop_all()
            return reserved
    assert why is not None
    told = "no port" if ports is None else f"no port of link_ports {ports[0]}-{ports[-1]}"
    raise LinkPortError(
        f"{told} is free at {host} for jobs over several boxes ({why.strerror}); check link_host and link_ports here"
    )
