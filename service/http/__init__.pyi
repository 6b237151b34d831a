"""HTTP servers: error answers, and bounds on connections and requests."""

from windlass.service.http.bodies import BodyLimitMiddleware as BodyLimitMiddleware
from windlass.service.http.bodies import drain as drain
from windlass.service.http.connections import BoundedConnection as BoundedConnection
from windlass.service.http.connections import ConnectionBounds as ConnectionBounds
from windlass.service.http.connections import bounded_protocol as bounded_protocol
from windlass.service.http.errors import answer_to_trouble as answer_to_trouble
from windlass.service.http.errors import error_response as error_response
from windlass.service.http.errors import install_error_handlers as install_error_handlers
