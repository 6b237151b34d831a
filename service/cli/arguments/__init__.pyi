"""Arguments of several commands: ids, and numbers of GPUs."""

from windlass.service.cli.arguments.gpu_numbers import busy_gpus_in_words as busy_gpus_in_words
from windlass.service.cli.arguments.gpu_numbers import gpus_in_words as gpus_in_words
from windlass.service.cli.arguments.gpu_numbers import gpus_option as gpus_option
from windlass.service.cli.arguments.ids import FILE as FILE
from windlass.service.cli.arguments.ids import JOB as JOB
from windlass.service.cli.arguments.ids import MODEL as MODEL
from windlass.service.cli.arguments.ids import client_for_job as client_for_job
from windlass.service.cli.arguments.ids import told_if_unknown as told_if_unknown
