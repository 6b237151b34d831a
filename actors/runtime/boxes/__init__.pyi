"""The boxes of one job: the link between their actors, and the start and the end of an attempt over them."""

from windlass.actors.runtime.boxes.box_link import BoxLink as BoxLink
from windlass.actors.runtime.boxes.box_link import LinkConfig as LinkConfig
from windlass.actors.runtime.boxes.box_link import LinkEnd as LinkEnd
from windlass.actors.runtime.boxes.first_box import BoxFailed as BoxFailed
from windlass.actors.runtime.boxes.first_box import BoxFailedError as BoxFailedError
from windlass.actors.runtime.boxes.first_box import FirstBox as FirstBox
from windlass.actors.runtime.boxes.first_box import require_no_failure as require_no_failure
from windlass.actors.runtime.boxes.local_boxes import run_local_box as run_local_box
from windlass.actors.runtime.boxes.ray_runners import start_box_runner as start_box_runner
from windlass.actors.runtime.boxes.ray_runners import start_first_box_runner as start_first_box_runner
