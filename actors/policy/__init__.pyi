"""The scheduler's decisions: events in, instructions out. No clock, no I/O, no Ray."""

from windlass.actors.policy.actions import Action as Action
from windlass.actors.policy.actions import DecideCommit as DecideCommit
from windlass.actors.policy.actions import EndStep as EndStep
from windlass.actors.policy.actions import StepEnd as StepEnd
from windlass.actors.policy.clipping import clip_scale as clip_scale
from windlass.actors.policy.config import SchedulerConfig as SchedulerConfig
from windlass.actors.policy.config import StageActors as StageActors
from windlass.actors.policy.folding import fold as fold
from windlass.actors.policy.pending_replies import DeadlineMissedError as DeadlineMissedError
from windlass.actors.policy.pending_replies import Instruction as Instruction
from windlass.actors.policy.pending_replies import UnexpectedEventError as UnexpectedEventError
from windlass.actors.policy.scheduler_core import Pipeline as Pipeline
from windlass.actors.policy.step_updates import NotFiniteError as NotFiniteError
from windlass.actors.policy.trainer_state import StepResult as StepResult
from windlass.actors.policy.trainer_state import TrainerState as TrainerState
