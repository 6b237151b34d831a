"""The dispatcher: the process that takes jobs from queued to done, with queue, launch, outcomes and leases."""

from windlass.service.dispatcher.boxes import Boxes as Boxes
from windlass.service.dispatcher.boxes import had_attempt as had_attempt
from windlass.service.dispatcher.job_watch import AttemptWatch as AttemptWatch
from windlass.service.dispatcher.outcomes import cancel_job as cancel_job
from windlass.service.dispatcher.outcomes import fail_job as fail_job
from windlass.service.dispatcher.outcomes import handle_loss as handle_loss
from windlass.service.dispatcher.outcomes import import_records as import_records
from windlass.service.dispatcher.outcomes import open_journal as open_journal
from windlass.service.dispatcher.placement import read_capacity as read_capacity
from windlass.service.dispatcher.process import RayLostError as RayLostError
from windlass.service.dispatcher.process import run_dispatcher as run_dispatcher
from windlass.service.dispatcher.replanner import AskStages as AskStages
from windlass.service.dispatcher.runners import Runners as Runners
from windlass.service.dispatcher.runners import have_exited as have_exited
