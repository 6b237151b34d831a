"""The bytes of the link on the network: control messages, data frames, and the handshakes of connections."""

from windlass.storage.link.wire.codec import Closing as Closing
from windlass.storage.link.wire.codec import Codec as Codec
from windlass.storage.link.wire.codec import Heartbeat as Heartbeat
from windlass.storage.link.wire.codec import Offered as Offered
from windlass.storage.link.wire.codec import Pulled as Pulled
from windlass.storage.link.wire.codec import Want as Want
from windlass.storage.link.wire.frames import DamagedFrame as DamagedFrame
from windlass.storage.link.wire.frames import FrameReader as FrameReader
from windlass.storage.link.wire.frames import FrameWriter as FrameWriter
from windlass.storage.link.wire.frames import receive_exactly as receive_exactly
from windlass.storage.link.wire.frames import send_all as send_all
from windlass.storage.link.wire.handshake import HANDSHAKE_S as HANDSHAKE_S
from windlass.storage.link.wire.handshake import Hello as Hello
from windlass.storage.link.wire.handshake import Keys as Keys
from windlass.storage.link.wire.handshake import Refusal as Refusal
from windlass.storage.link.wire.handshake import Welcome as Welcome
from windlass.storage.link.wire.handshake import connect_control as connect_control
from windlass.storage.link.wire.handshake import connect_data as connect_data
from windlass.storage.link.wire.handshake import expect_welcome as expect_welcome
from windlass.storage.link.wire.handshake import is_control as is_control
from windlass.storage.link.wire.handshake import make_hello as make_hello
from windlass.storage.link.wire.handshake import reason_to_refuse as reason_to_refuse
from windlass.storage.link.wire.handshake import receive_data_hello as receive_data_hello
from windlass.storage.link.wire.handshake import receive_handshake as receive_handshake
from windlass.storage.link.wire.handshake import require_certificate_of as require_certificate_of
from windlass.storage.link.wire.handshake import send_handshake as send_handshake
