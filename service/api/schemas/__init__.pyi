"""The objects that the API takes and returns."""

from windlass.service.api.schemas.objects import CheckpointObject as CheckpointObject
from windlass.service.api.schemas.objects import CreateJob as CreateJob
from windlass.service.api.schemas.objects import CurveColumns as CurveColumns
from windlass.service.api.schemas.objects import EventObject as EventObject
from windlass.service.api.schemas.objects import FileObject as FileObject
from windlass.service.api.schemas.objects import JobList as JobList
from windlass.service.api.schemas.objects import JobObject as JobObject
from windlass.service.api.schemas.objects import MetricsObject as MetricsObject
from windlass.service.api.schemas.objects import ModelObject as ModelObject
from windlass.service.api.schemas.objects import ResumeJob as ResumeJob
from windlass.service.api.schemas.objects import StreamedEvent as StreamedEvent
from windlass.service.api.schemas.objects import StreamStart as StreamStart
from windlass.service.api.schemas.objects import TraceObject as TraceObject
from windlass.service.api.schemas.objects import event_ordinal as event_ordinal
from windlass.service.api.schemas.plans import JobPlanObject as JobPlanObject
from windlass.service.api.schemas.plans import PlanObject as PlanObject
