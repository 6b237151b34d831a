"""API keys: the caller of a request, the limits of a key, and the rule that an exposed service needs a key."""

from windlass.service.auth.caller import Caller as Caller
from windlass.service.auth.command_audit import record_command as record_command
from windlass.service.auth.exposure import migrate_database as migrate_database
from windlass.service.auth.exposure import prepare_database as prepare_database
from windlass.service.auth.exposure import require_auth_if_exposed as require_auth_if_exposed
from windlass.service.auth.user_limits import KeyLimits as KeyLimits
from windlass.service.auth.user_limits import are_stored_bytes_limited as are_stored_bytes_limited
from windlass.service.auth.user_limits import check_one_more_endpoint as check_one_more_endpoint
from windlass.service.auth.user_limits import check_one_more_file as check_one_more_file
from windlass.service.auth.user_limits import check_one_more_job as check_one_more_job
from windlass.service.auth.user_limits import check_priority as check_priority
from windlass.service.auth.user_limits import check_room_to_store as check_room_to_store
from windlass.service.auth.user_limits import most_running_jobs as most_running_jobs
