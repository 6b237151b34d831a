"""The actor that reads params from the SSDs into the slots from which all GPU workers of a box copy them."""

from windlass.actors.params.requests import ParamRequests as ParamRequests
from windlass.actors.params.requests import param_turns as param_turns
from windlass.actors.params.server import ParamServer as ParamServer
