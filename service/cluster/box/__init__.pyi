"""The box's side: joining, the agent that calls the head, and the files that it fetches and sends."""

from windlass.service.cluster.box.agent import run_agent as run_agent
from windlass.service.cluster.box.connection import BoxRemoved as BoxRemoved
from windlass.service.cluster.box.connection import HeadConnection as HeadConnection
from windlass.service.cluster.box.connection import HeadRefused as HeadRefused
from windlass.service.cluster.box.connection import HeadUnreachable as HeadUnreachable
from windlass.service.cluster.box.connection import Membership as Membership
from windlass.service.cluster.box.connection import VersionDiffers as VersionDiffers
from windlass.service.cluster.box.connection import membership_of as membership_of
