"""The place where each job begins: the capacity of each box, the queue's policy, and the choice of a box."""

from windlass.service.dispatcher.placement.absent_boxes import watch_absent_boxes as watch_absent_boxes
from windlass.service.dispatcher.placement.capacity import BUFFERS as BUFFERS
from windlass.service.dispatcher.placement.capacity import DEVICES as DEVICES
from windlass.service.dispatcher.placement.capacity import HOST_MEMORY as HOST_MEMORY
from windlass.service.dispatcher.placement.capacity import Demand as Demand
from windlass.service.dispatcher.placement.capacity import MachineCapacity as MachineCapacity
from windlass.service.dispatcher.placement.capacity import SsdSpace as SsdSpace
from windlass.service.dispatcher.placement.capacity import demand_of as demand_of
from windlass.service.dispatcher.placement.capacity import read_capacity as read_capacity
from windlass.service.dispatcher.placement.fleet import Fleet as Fleet
from windlass.service.dispatcher.placement.fleet import JoinedBox as JoinedBox
from windlass.service.dispatcher.placement.fleet import kind_of as kind_of
from windlass.service.dispatcher.placement.handing_over import hand_over as hand_over
from windlass.service.dispatcher.placement.handing_over import take_back as take_back
from windlass.service.dispatcher.placement.placement_policy import BoxState as BoxState
from windlass.service.dispatcher.placement.placement_policy import Candidate as Candidate
from windlass.service.dispatcher.placement.placement_policy import Option as Option
from windlass.service.dispatcher.placement.placement_policy import Placement as Placement
from windlass.service.dispatcher.placement.placement_policy import place as place
from windlass.service.dispatcher.placement.queue_policy import Amounts as Amounts
from windlass.service.dispatcher.placement.queue_policy import Decision as Decision
from windlass.service.dispatcher.placement.queue_policy import Holder as Holder
from windlass.service.dispatcher.placement.queue_policy import Queued as Queued
from windlass.service.dispatcher.placement.queue_policy import Turn as Turn
from windlass.service.dispatcher.placement.queue_policy import decide as decide
from windlass.service.dispatcher.placement.queue_policy import in_turn as in_turn
