"""The links between the boxes of a job in one attempt."""

import secrets
from collections.abc import Mapping, Sequence

from windlass.actors.runtime.boxes import LinkConfig
from windlass.actors.runtime.moving import MoveSpec
from windlass.planner.stages import StagesPlan
from windlass.service.installation import Settings, link_host_of
from windlass.service.jobs import MachineResources, build_move_spec
from windlass.service.machine.fleet import PartLink, PartMove, link_files
from windlass.service.validation import ReportedError
from windlass.storage.ids import BoxName
from windlass.storage.link import SECRET_NBYTES, LinkSettings
from windlass.storage.sql import Job

# Seconds for all boxes to hear of an attempt, to start its processes, and to connect.
_CONNECT_S = 180.0


def new_links(addresses: Mapping[BoxName, tuple[str, int]]) -> Sequence[PartLink]:
    """Returns what each box of a job is told for an attempt, with a new secret.

    `addresses`: host and port of each box, in the order of the job's boxes.
    """
    secret, named = secrets.token_hex(SECRET_NBYTES), {str(name): address for name, address in addresses.items()}
    return [PartLink(names=tuple(named), port=port, addresses=named, secret=secret) for _, port in named.values()]


def with_move(
    links: Sequence[PartLink], before: StagesPlan, after: StagesPlan, boxes: Sequence[str]
) -> Sequence[PartLink]:
    """Returns what each box is told for an attempt that moves the states from one division to another.

    `boxes`: the names of all boxes of both divisions, in the order of `links`.
    """
    plans = before.to_json(), after.to_json()
    moves = [PartMove(before=plans[0], after=plans[1], boxes=tuple(boxes), box=box) for box in range(len(links))]
    return [link.model_copy(update={"move": move}) for link, move in zip(links, moves, strict=True)]


def move_of(settings: Settings, resources: MachineResources, job: Job, move: PartMove) -> MoveSpec:
    """Returns one box's part in the attempt in the job's row, which is a move. Raises as `build_move_spec`."""
    plans = StagesPlan.from_json(move.before), StagesPlan.from_json(move.after)
    return build_move_spec(settings, resources, job, plans, move.boxes, move.box)


def link_config(settings: Settings, link: PartLink, position: int) -> LinkConfig:
    """Returns the end of a link that the runner of this box opens. Raises ReportedError if the box cannot have one.

    `position`: of this box among the boxes of the job.
    """
    host, certificates = link_host_of(settings), link_files(settings.home)
    if host is None:
        raise ReportedError("the address of this box for jobs over several boxes is not known; set link_host")
    if certificates is None:
        raise ReportedError(
            "this box has no certificate yet for jobs over several boxes; its agent asks the head for it"
        )
    names = tuple(map(BoxName, link.names))
    return LinkConfig(
        names=names,
        address=(host, link.port),
        addresses={name: link.addresses[name] for name in names if name != names[position]},
        certificates=certificates,
        secret=bytes.fromhex(link.secret),
        settings=LinkSettings(connect_s=_CONNECT_S),
    )
