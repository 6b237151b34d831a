"""Limits and headers of every request: rates, turns of users, hidden paths."""

from windlass.service.api.middleware.hidden_paths import HiddenPathsMiddleware as HiddenPathsMiddleware
from windlass.service.api.middleware.rate_limit import BusyError as BusyError
from windlass.service.api.middleware.rate_limit import RateLimits as RateLimits
from windlass.service.api.middleware.rate_limit import Turnstile as Turnstile
from windlass.service.api.middleware.request_turns import RequestTurns as RequestTurns
from windlass.service.api.middleware.security import NullCharacterMiddleware as NullCharacterMiddleware
from windlass.service.api.middleware.security import SameOriginMiddleware as SameOriginMiddleware
from windlass.service.api.middleware.security import SecurityHeadersMiddleware as SecurityHeadersMiddleware
