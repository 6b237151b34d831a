"""Training data: reads files of examples, writes token files, and maps these as a data set."""

from windlass.engine.data.data_check import MAX_CHECK_S as MAX_CHECK_S
from windlass.engine.data.data_check import check_data as check_data
from windlass.engine.data.dataset import DatasetError as DatasetError
from windlass.engine.data.dataset import MicroBatch as MicroBatch
from windlass.engine.data.dataset import PreparedDataset as PreparedDataset
from windlass.engine.data.dataset import example_lengths as example_lengths
from windlass.engine.data.example_bounds import memory_limit as memory_limit
from windlass.engine.data.examples import ChatExample as ChatExample
from windlass.engine.data.examples import DataError as DataError
from windlass.engine.data.examples import DataFile as DataFile
from windlass.engine.data.examples import is_accepted as is_accepted
from windlass.engine.data.hints import HEAD_NBYTES as HEAD_NBYTES
from windlass.engine.data.hints import foreign_file as foreign_file
from windlass.engine.data.hints import format_hint as format_hint
