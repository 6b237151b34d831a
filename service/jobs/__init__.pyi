"""Facts that the service derives from a job's row: its specification, its plan, its files."""

from windlass.service.jobs.full_disk import why_it_waits_for_room as why_it_waits_for_room
from windlass.service.jobs.plan_files import expected_pace as expected_pace
from windlass.service.jobs.plan_files import has_plan as has_plan
from windlass.service.jobs.plan_files import keep_plan as keep_plan
from windlass.service.jobs.plan_files import load_plan as load_plan
from windlass.service.jobs.plan_files import load_plan_request as load_plan_request
from windlass.service.jobs.plan_files import plan_for_gpus as plan_for_gpus
from windlass.service.jobs.plan_files import plans_of as plans_of
from windlass.service.jobs.plan_files import seconds_left as seconds_left
from windlass.service.jobs.plan_view import in_words as in_words
from windlass.service.jobs.plan_view import view_of as view_of
from windlass.service.jobs.spec_builder import ARENA_DIR as ARENA_DIR
from windlass.service.jobs.spec_builder import MachineResources as MachineResources
from windlass.service.jobs.spec_builder import build_job_spec as build_job_spec
from windlass.service.jobs.spec_builder import chooses_gpus as chooses_gpus
from windlass.service.jobs.spec_builder import gpus_of as gpus_of
from windlass.service.jobs.spec_builder import job_dir as job_dir
from windlass.service.jobs.spec_builder import journal_path as journal_path
from windlass.service.jobs.spec_builder import most_gpus_of as most_gpus_of
from windlass.service.jobs.spec_builder import plan_bounds as plan_bounds
from windlass.service.jobs.spec_builder import plan_request as plan_request
from windlass.service.jobs.spec_builder import preparation_order as preparation_order
from windlass.service.jobs.spec_builder import resolve_job as resolve_job
from windlass.service.jobs.spec_builder import threads_of as threads_of
from windlass.service.jobs.spec_builder import with_gpus as with_gpus
from windlass.service.jobs.ssd_endurance import ssd_wear as ssd_wear
