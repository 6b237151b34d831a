"""Messages about the model as a whole: its kernels, its initial weights, its export."""

from dataclasses import dataclass

from windlass.actors.messages.base import Message
from windlass.storage.ids import ActorName, Kernel, ModelKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChosen(Message):
    """What an actor updates states with; kernels differ in the last bit."""

    actor: ActorName
    kernel: Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKernelsChosen(Message):
    """What an actor computes the model with, beside torch's own kernels."""

    actor: ActorName
    kernels: tuple[ModelKernel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel(Message):
    """Stream the initial weights into the store, as the states of step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgressed(Message):
    """So many parameters of the model are in the store or, where an attempt goes on, back in this actor's memory."""

    actor: ActorName
    num_params: int
    total_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded(Message):
    """The initial states are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportModel(Message):
    """Write the params of `step` as a Hugging Face model folder."""

    path: str
    copy_of: str | None = None  # an earlier export that it is to be instead


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExported(Message):
    """The folder is complete: it was renamed into place."""

    path: str
