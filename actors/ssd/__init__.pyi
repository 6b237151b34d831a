"""The SSD server, which transfers chunks between one SSD and the arena, and who asks it for other actors."""

from windlass.actors.ssd.client import SsdClient as SsdClient
from windlass.actors.ssd.client import chunk_io as chunk_io
from windlass.actors.ssd.param_requests import ParamRequests as ParamRequests
from windlass.actors.ssd.param_requests import param_turns as param_turns
from windlass.actors.ssd.param_server import ParamServer as ParamServer
from windlass.actors.ssd.server import SsdServer as SsdServer
