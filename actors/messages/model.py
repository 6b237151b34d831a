"""Messages about the model as a whole: its kernels, its initial weights, its export."""

from dataclasses import dataclass

from windlass.actors.messages.base import Message
from windlass.storage.ids import ActorName, Kernel, ModelKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChosen(Message):
    """Reports the kernel with which an actor updates states. Results of different kernels differ in the last bit."""

    actor: ActorName
    kernel: Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKernelsChosen(Message):
    """Reports the kernels with which an actor computes the model, in addition to torch's own."""

    actor: ActorName
    kernels: tuple[ModelKernel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel(Message):
    """Asks an optimizer to stream the initial weights into the store, as the states of step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgressed(Message):
    """Reports how many parameters are in the store or, in a resumed attempt, restored into this actor's memory."""

    actor: ActorName
    num_params: int
    total_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded(Message):
    """Reports that the initial states are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportModel(Message):
    """Asks an optimizer to write the params of `step` as a Hugging Face model folder."""

    path: str
    copy_of: str | None = None  # path of an earlier export; if set, that one is copied instead


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExported(Message):
    """Reports that the model folder is complete and was renamed to its final path."""

    path: str
