"""The boxes of one job: the link between their actors, and the start and the end of an attempt over them."""

from windlass.actors.runtime.boxes.box_link import BoxLink as BoxLink
from windlass.actors.runtime.boxes.box_link import LinkConfig as LinkConfig
from windlass.actors.runtime.boxes.box_link import LinkEnd as LinkEnd
from windlass.actors.runtime.boxes.local_boxes import over_sockets as over_sockets
from windlass.actors.runtime.boxes.local_boxes import run_local_box as run_local_box
from windlass.actors.runtime.boxes.other_boxes import BoxFailedError as BoxFailedError
from windlass.actors.runtime.boxes.ray_runners import start_box_runner as start_box_runner
from windlass.actors.runtime.boxes.ray_runners import start_first_box_runner as start_first_box_runner
