"""The messages between the actors of a job: ids and descriptors, never tensors.

Commands have imperative names, events past-tense names; failures are events too. Every message carries its job and
either a step and block or a correlation id. The scheduler's messages are about blocks. Workers send messages about
chunks directly to each other.
"""

from windlass.actors.messages.base import Event as Event
from windlass.actors.messages.base import Message as Message
from windlass.actors.messages.codec import decode as decode
from windlass.actors.messages.codec import encode as encode
from windlass.actors.messages.codec import message_types as message_types
from windlass.actors.messages.compute import BlockComputed as BlockComputed
from windlass.actors.messages.compute import CommitReached as CommitReached
from windlass.actors.messages.compute import ComputeBlock as ComputeBlock
from windlass.actors.messages.compute import ComputeBlocks as ComputeBlocks
from windlass.actors.messages.compute import ComputeProgressed as ComputeProgressed
from windlass.actors.messages.compute import GradReady as GradReady
from windlass.actors.messages.compute import Loss as Loss
from windlass.actors.messages.compute import ParamRequest as ParamRequest
from windlass.actors.messages.compute import Phase as Phase
from windlass.actors.messages.compute import StoredParams as StoredParams
from windlass.actors.messages.crossings import Crossing as Crossing
from windlass.actors.messages.crossings import OfferSpan as OfferSpan
from windlass.actors.messages.crossings import OfferTaken as OfferTaken
from windlass.actors.messages.crossings import PullSpan as PullSpan
from windlass.actors.messages.crossings import SpanPulled as SpanPulled
from windlass.actors.messages.failures import ActorFailed as ActorFailed
from windlass.actors.messages.failures import FailureKind as FailureKind
from windlass.actors.messages.failures import in_words as in_words
from windlass.actors.messages.model import ExportModel as ExportModel
from windlass.actors.messages.model import ExportProgressed as ExportProgressed
from windlass.actors.messages.model import KernelChosen as KernelChosen
from windlass.actors.messages.model import LoadModel as LoadModel
from windlass.actors.messages.model import LoadProgressed as LoadProgressed
from windlass.actors.messages.model import ModelExported as ModelExported
from windlass.actors.messages.model import ModelKernelsChosen as ModelKernelsChosen
from windlass.actors.messages.model import ModelLoaded as ModelLoaded
from windlass.actors.messages.model import OfferParams as OfferParams
from windlass.actors.messages.optimizer import BlockFlushed as BlockFlushed
from windlass.actors.messages.optimizer import BlockUpdated as BlockUpdated
from windlass.actors.messages.optimizer import FlushBlock as FlushBlock
from windlass.actors.messages.optimizer import GradChunk as GradChunk
from windlass.actors.messages.optimizer import GradOffloaded as GradOffloaded
from windlass.actors.messages.optimizer import GradSlotsReleased as GradSlotsReleased
from windlass.actors.messages.optimizer import RestoreStates as RestoreStates
from windlass.actors.messages.optimizer import SkipStep as SkipStep
from windlass.actors.messages.optimizer import StatesRestored as StatesRestored
from windlass.actors.messages.optimizer import UpdateBlock as UpdateBlock
from windlass.actors.messages.optimizer import UpdateStep as UpdateStep
from windlass.actors.messages.params import ParamChunk as ParamChunk
from windlass.actors.messages.params import ParamsArrived as ParamsArrived
from windlass.actors.messages.params import ParamsCopied as ParamsCopied
from windlass.actors.messages.params import ParamUse as ParamUse
from windlass.actors.messages.params import RequestParams as RequestParams
from windlass.actors.messages.params import SumParts as SumParts
from windlass.actors.messages.params import SumPassed as SumPassed
from windlass.actors.messages.params import SumTaken as SumTaken
from windlass.actors.messages.ssd import ActivationIoDone as ActivationIoDone
from windlass.actors.messages.ssd import ChunkIo as ChunkIo
from windlass.actors.messages.ssd import ChunkIoDone as ChunkIoDone
from windlass.actors.messages.ssd import ChunkPart as ChunkPart
from windlass.actors.messages.ssd import CommitDecided as CommitDecided
from windlass.actors.messages.ssd import CommitStore as CommitStore
from windlass.actors.messages.ssd import ReadActivations as ReadActivations
from windlass.actors.messages.ssd import ReadChunks as ReadChunks
from windlass.actors.messages.ssd import SsdRequest as SsdRequest
from windlass.actors.messages.ssd import StoreCommitted as StoreCommitted
from windlass.actors.messages.ssd import WriteActivations as WriteActivations
from windlass.actors.messages.ssd import WriteChunks as WriteChunks
from windlass.actors.messages.telemetry import DescribeStatus as DescribeStatus
from windlass.actors.messages.telemetry import MemoryKind as MemoryKind
from windlass.actors.messages.telemetry import MemoryReported as MemoryReported
from windlass.actors.messages.telemetry import SpanKind as SpanKind
from windlass.actors.messages.telemetry import SpansReported as SpansReported
from windlass.actors.messages.telemetry import StatusDescribed as StatusDescribed
from windlass.actors.messages.telemetry import UserMessage as UserMessage
from windlass.actors.messages.telemetry import WorkSpan as WorkSpan
