"""The box's part in measurements of the network, one after the other, as the head asks for them."""

import logging

from windlass.service.installation import Settings
from windlass.service.machine.fleet import LinkProbe, ProbeAnswer, ProbeAsk

_LOG = logging.getLogger(__name__)
_CLOSE_S = 10.0


class Probes:
    """Takes part in measurements. One thread calls it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._probe: LinkProbe | None = None

    def follow(self, ask: ProbeAsk | None) -> None:
        """Begins the measurement that the head asks for, and ends another one first. None: it asks for none."""
        if self._probe is not None and (ask is None or ask.id != self._probe.ask.id):
            self._probe.cancel()
            if self._probe.join(0.0):
                self._probe = None
        if ask is not None and self._probe is None:
            _LOG.info("measuring the network to box %s", ask.peer)
            self._probe = LinkProbe(self._settings, ask)

    def answer(self) -> ProbeAnswer | None:
        """Returns how far the present measurement is; None: there is none."""
        return None if self._probe is None else self._probe.answer()

    def close(self) -> None:
        """Ends the present measurement."""
        if self._probe is not None:
            self._probe.cancel()
            self._probe.join(_CLOSE_S)  # a thread that hangs ends with the process
            self._probe = None
