"""Measures how long a new box takes to join: from its command to the moment in which the head lists it as ready.

Head and box are namespaces of this machine, each with an address, a home, processes and a Ray of its own.
"""

import time
from pathlib import Path

from tests.e2e.box_service import HEAD, BoxService
from tests.support.boxes.namespaces import NamespaceError
from tests.support.boxes.network import Network

_BOX = "left"


def join_s(folder: Path) -> float | None:
    """Returns the seconds, or None where this machine does not allow namespaces."""
    try:
        network = Network(folder, (HEAD, _BOX))
    except NamespaceError as error:
        print(f"the time to join is left out: {error}", flush=True)
        return None
    try:
        boxes = BoxService(network)
        boxes.start_head()
        command = boxes.join_arguments(_BOX, boxes.new_code())
        start_s = time.monotonic()
        boxes[_BOX].ok(*command)
        boxes.await_box(_BOX, "ready")
        return time.monotonic() - start_s
    finally:
        network.close()
