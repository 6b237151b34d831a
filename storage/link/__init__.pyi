"""The link between the boxes of one job: each box pulls bytes from the others into memory that it has reserved."""

from windlass.storage.link.errors import LinkClosed as LinkClosed
from windlass.storage.link.errors import LinkError as LinkError
from windlass.storage.link.errors import PeerClosed as PeerClosed
from windlass.storage.link.errors import PeerLost as PeerLost
from windlass.storage.link.errors import ProtocolError as ProtocolError
from windlass.storage.link.errors import PullOverdue as PullOverdue
from windlass.storage.link.errors import Refused as Refused
from windlass.storage.link.keys import KeyKind as KeyKind
from windlass.storage.link.keys import LinkKey as LinkKey
from windlass.storage.link.link import Link as Link
from windlass.storage.link.link import listen as listen
from windlass.storage.link.settings import SECRET_NBYTES as SECRET_NBYTES
from windlass.storage.link.settings import Certificates as Certificates
from windlass.storage.link.settings import Identity as Identity
from windlass.storage.link.settings import LinkSettings as LinkSettings
from windlass.storage.link.settings import Protection as Protection
from windlass.storage.link.settings import server_name as server_name
from windlass.storage.link.transfers import IncomingTransfers as IncomingTransfers
from windlass.storage.link.transfers import OutgoingTransfers as OutgoingTransfers
from windlass.storage.link.wire import Codec as Codec
