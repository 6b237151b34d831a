"""A sandbox: limited processes for the steps that read users' files."""

from windlass.service.preparation.sandbox.process import PASSED_ON as PASSED_ON
from windlass.service.preparation.sandbox.process import LimitedCommand as LimitedCommand
from windlass.service.preparation.sandbox.process import LimitedProcess as LimitedProcess
from windlass.service.preparation.sandbox.process import ServerEndedError as ServerEndedError
from windlass.service.preparation.sandbox.process import Start as Start
from windlass.service.preparation.sandbox.process import StepServer as StepServer
from windlass.service.preparation.sandbox.process import start_limited as start_limited
from windlass.service.preparation.sandbox.warm_process import WarmProcess as WarmProcess
