"""Prepares jobs: downloads and checks the model, prepares the data, makes the plan."""

from windlass.service.preparation.disk_check import check_model_room as check_model_room
from windlass.service.preparation.events import tell_warnings as tell_warnings
from windlass.service.preparation.memory import PreparationMemory as PreparationMemory
from windlass.service.preparation.model_files import HubFiles as HubFiles
from windlass.service.preparation.model_files import check_model as check_model
from windlass.service.preparation.model_files import fit_sequence_length as fit_sequence_length
from windlass.service.preparation.model_files import list_hub_files as list_hub_files
from windlass.service.preparation.pipeline import Preparation as Preparation
from windlass.service.preparation.pipeline import PreparationError as PreparationError
from windlass.service.preparation.pipeline import StepFailedError as StepFailedError
from windlass.service.preparation.pipeline import preparation_of as preparation_of
from windlass.service.preparation.steps import CHECK_MODEL as CHECK_MODEL
from windlass.service.preparation.steps import KINDS_FOLDER as KINDS_FOLDER
from windlass.service.preparation.steps import PLAN_JOB as PLAN_JOB
from windlass.service.preparation.steps import PREPARE_DATA as PREPARE_DATA
from windlass.service.preparation.steps import QUESTION_FILE as QUESTION_FILE
from windlass.service.preparation.steps import PreparationOrder as PreparationOrder
from windlass.service.preparation.steps import PreparationStep as PreparationStep
from windlass.service.preparation.steps import Results as Results
from windlass.service.preparation.steps import plan_step as plan_step
from windlass.service.preparation.steps import step_server as step_server
from windlass.service.preparation.steps import warm_planner as warm_planner
from windlass.service.preparation.turns import Candidate as Candidate
from windlass.service.preparation.turns import OwnerShares as OwnerShares
from windlass.service.preparation.turns import choose_running as choose_running
