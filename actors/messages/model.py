"""Messages about the model as a whole: its kernels, its initial weights, its export."""

from dataclasses import dataclass

from windlass.actors.messages.base import Event, Message
from windlass.storage.ids import ChunkKey, Kernel, ModelKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChosen(Event):
    """Reports the kernel with which an actor updates states. Results of different kernels differ in the last bit."""

    kernel: Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKernelsChosen(Event):
    """Reports the kernels with which an actor computes the model, in addition to torch's own."""

    kernels: tuple[ModelKernel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel(Message):
    """Asks an optimizer to stream the initial weights into the store, as the states of step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgressed(Event):
    """Reports how many parameters are in the store or, in a resumed attempt, restored into this actor's memory."""

    num_params: int
    total_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded(Event):
    """Reports that the initial states are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportModel(Message):
    """Asks an optimizer to write the params of `step` as a Hugging Face model folder."""

    path: str
    copy_of: str | None = None  # path of an earlier export; if set, that one is copied instead


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferParams(Message):
    """Asks an optimizer to offer a chunk's params of `step` to the first box, whose optimizer exports the model."""

    key: ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportProgressed(Event):
    """Reports how much of the model of `step` is in the folder to which it is exported."""

    share: float  # from 0 to 1; 1: the files are complete and are being synced to the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExported(Event):
    """Reports that the model folder is complete and was renamed to its final path."""

    path: str
