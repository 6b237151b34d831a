"""Links of several boxes in one process, over real sockets of the loopback interface."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trustme

from windlass.storage.ids import Attempt, BlockIndex, BoxName, JobId, Step
from windlass.storage.link import (
    Certificates,
    Codec,
    Identity,
    KeyKind,
    Link,
    LinkKey,
    LinkSettings,
    PeerLost,
    listen,
    server_name,
)

WAIT_S = 20.0  # for what must happen
SECRET = bytes(range(32))
# Times that tests can wait for, and pieces so small that a key has several.
QUICK = LinkSettings(
    num_streams=2, piece_nbytes=4096, window_nbytes=16384, heartbeat_s=0.1, stall_s=5.0, silence_s=10.0
)


@dataclass(frozen=True)
class Note:
    """A message that tests register."""

    text: str
    number: int = 0


def key(block: int, *, kind: KeyKind = KeyKind.ACTIVATION, group: int = 0, part: int = 0) -> LinkKey:
    """Returns a key of step 1."""
    return LinkKey(kind=kind, step=Step(1), group=group, block=BlockIndex(block), part=part)


def identity(box: str, *, attempt: int = 1, secret: bytes = SECRET) -> Identity:
    """Returns the identity of a box."""
    return Identity(job=JobId("job"), attempt=Attempt(attempt), epoch=0, box=BoxName(box), secret=secret)


class Authority:
    """An authority in a folder, which makes certificates for links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(folder / "authority.pem")

    def certificates(self, box: str, *, names: str | None = None) -> Certificates:
        """Returns the certificate of a box. `names`: the box that it names instead."""
        path = self._folder / f"{box}.pem"
        certificate = self._authority.issue_cert(server_name(BoxName(names or box)))
        certificate.private_key_and_cert_chain_pem.write_to_path(path)
        return Certificates(certificate=path, authority=self._folder / "authority.pem")


@dataclass
class Ends:
    """The links of a test, with what arrived at each."""

    links: dict[str, Link]
    messages: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    losses: dict[str, list[PeerLost]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __getitem__(self, box: str) -> Link:
        return self.links[box]

    def wait(self, until: Callable[[], object]) -> None:
        """Waits for messages or losses."""
        with self.changed:
            assert self.changed.wait_for(until, WAIT_S)


@contextmanager
def linked(
    folder: Path,
    boxes: Sequence[str] = ("left", "right"),
    *,
    settings: LinkSettings = QUICK,
    via: Callable[[str, int], int] = lambda box, port: port,
    **identities: Identity,
) -> Iterator[Ends]:
    """Starts links of boxes that are each other's peers. `via`: the port at which others reach a box's port."""
    ends = Ends({})
    authority = Authority(folder)
    with ExitStack() as stack:
        listeners = {box: listen("127.0.0.1") for box in boxes}
        ports = {box: via(box, listener.getsockname()[1]) for box, listener in listeners.items()}
        for box in boxes:
            ends.messages[box], ends.losses[box] = [], []

            def on_message(sender: BoxName, message: Any, box: str = box) -> None:
                with ends.changed:
                    ends.messages[box].append((sender, message))
                    ends.changed.notify_all()

            def on_lost(peer: BoxName, error: PeerLost, box: str = box) -> None:
                with ends.changed:
                    ends.losses[box].append(error)
                    ends.changed.notify_all()

            ends.links[box] = Link.start(
                identities.get(box, identity(box)),
                listeners[box],
                {BoxName(other): ("127.0.0.1", ports[other]) for other in boxes if other != box},
                authority.certificates(box),
                settings=settings,
                codec=Codec([Note]),
                on_message=on_message,
                on_lost=on_lost,
            )
            stack.callback(ends.links[box].close, 0.5)
        yield ends


def quick(**changes: Any) -> LinkSettings:
    """Returns the settings of tests, changed."""
    return replace(QUICK, **changes)
