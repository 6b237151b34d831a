"""The decisions of workers that need no scheduler. No clock, no I/O, no Ray."""

from windlass.actors.worker_policy.block_queue import BlockQueue as BlockQueue
from windlass.actors.worker_policy.block_queue import Ordering as Ordering
from windlass.actors.worker_policy.block_queue import QueueOrder as QueueOrder
from windlass.actors.worker_policy.chunk_queue import ChunkQueue as ChunkQueue
from windlass.actors.worker_policy.chunk_queue import Countdown as Countdown
from windlass.actors.worker_policy.chunk_queue import QueuedChunk as QueuedChunk
from windlass.actors.worker_policy.grad_sums import GradSums as GradSums
from windlass.actors.worker_policy.grad_sums import ReturningSums as ReturningSums
from windlass.actors.worker_policy.grad_sums import SumSource as SumSource
from windlass.actors.worker_policy.grad_sums import Use as Use
from windlass.actors.worker_policy.grad_sums import leaving_sums as leaving_sums
from windlass.actors.worker_policy.param_turns import ParamActions as ParamActions
from windlass.actors.worker_policy.param_turns import ParamRead as ParamRead
from windlass.actors.worker_policy.param_turns import ParamTurns as ParamTurns
from windlass.actors.worker_policy.ranks import ends_rank as ends_rank
from windlass.actors.worker_policy.ranks import num_ranks_in_round as num_ranks_in_round
from windlass.actors.worker_policy.ranks import rank_of as rank_of
from windlass.actors.worker_policy.ranks import round_of as round_of
from windlass.actors.worker_policy.worker_queues import GRANTED_AHEAD as GRANTED_AHEAD
from windlass.actors.worker_policy.worker_queues import REPORT_EVERY as REPORT_EVERY
from windlass.actors.worker_policy.worker_queues import ComputeReports as ComputeReports
from windlass.actors.worker_policy.worker_queues import GradReleases as GradReleases
from windlass.actors.worker_policy.worker_queues import OffloadQueue as OffloadQueue
from windlass.actors.worker_policy.worker_queues import OperationWindow as OperationWindow
from windlass.actors.worker_policy.worker_queues import UpdateActions as UpdateActions
from windlass.actors.worker_policy.worker_queues import UpdateQueue as UpdateQueue
