"""The upkeep of a box's end of links to other boxes: its certificate, and the address that it is reached by."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from windlass.service.cluster.authority import LinkCertificate
from windlass.service.cluster.box.connection import BoxRemoved, HeadRefused, HeadUnreachable
from windlass.service.cluster.box.head_link import HeadLink
from windlass.service.installation import note_link_host
from windlass.storage.ids import BoxName

_LOG = logging.getLogger(__name__)

# Seconds between looks at the certificate, and between tries to renew it.
_LOOK_EVERY_S = 60.0


class LinkUpkeep:
    """Keeps the certificate and the address of a box. One thread calls `tend`."""

    def __init__(
        self, home: Path, link: HeadLink, name: BoxName, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name`: see `link_name`."""
        self._home = home
        self._link = link
        self._certificate = LinkCertificate(home, name)
        self._clock = clock
        self._look_at = clock()

    def tend(self) -> None:
        """Renews what needs it, after an answer of the head. Raises BoxRemoved; what else fails is tried again."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        try:
            if (host := self._link.local_host) is not None:
                note_link_host(self._home, host)
            if not self._certificate.is_fresh():
                self._certificate.renew(self._link.sign_link)
                _LOG.info("the certificate for links to other boxes is new")
        except BoxRemoved:
            raise
        except (HeadUnreachable, HeadRefused, ValueError, OSError) as error:  # an older head has no such call
            _LOG.warning("the certificate for links to other boxes could not be renewed: %s", error)
