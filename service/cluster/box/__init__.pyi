"""The box's side: joining, the agent that calls the head, and the files that it fetches and sends."""

from windlass.service.cluster.box.agent import run_agent as run_agent
from windlass.service.cluster.box.connection import BoxRemoved as BoxRemoved
from windlass.service.cluster.box.connection import HeadConnection as HeadConnection
from windlass.service.cluster.box.connection import HeadRefused as HeadRefused
from windlass.service.cluster.box.connection import HeadUnreachable as HeadUnreachable
from windlass.service.cluster.box.connection import Membership as Membership
from windlass.service.cluster.box.connection import VersionDiffers as VersionDiffers
from windlass.service.cluster.box.connection import membership_of as membership_of
from windlass.service.cluster.box.join import ask_to_join as ask_to_join
from windlass.service.cluster.box.join import check_home as check_home
from windlass.service.cluster.box.join import forget_head as forget_head
from windlass.service.cluster.box.join import has_been_heard as has_been_heard
from windlass.service.cluster.box.join import leave_head as leave_head
from windlass.service.cluster.box.join import match_versions as match_versions
from windlass.service.cluster.box.join import meet_head as meet_head
from windlass.service.cluster.box.join import settings_of_box as settings_of_box
from windlass.service.cluster.box.join import url_of_head as url_of_head
from windlass.service.cluster.box.parts import discard_parts as discard_parts
