"""The request for a plan of one job over several boxes, with its JSON for the planner's process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from windlass.engine.training_config import TrainingConfig
from windlass.planner.hardware import Hardware
from windlass.planner.question import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedBox:
    """One of the boxes that a job is to have."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    hardware: Hardware | None  # None: it was not measured
    num_optimizers: int
    host_memory_nbytes: int | None  # budget of the arena; None: all of the machine's
    device_memory_nbytes: int | None
    ssd_nbytes: int | None = None  # free for the job's states on its SSDs, all together; None: as it was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesRequest:
    """A request to plan a job over these boxes. Other fields are as in a PlanRequest."""

    # The request of a newer version has more fields, which must not be ignored.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model_dir: Path
    layout_file: Path  # the model's blocks, as the job's preparation wrote them
    dataset_dir: Path | None
    training: TrainingConfig
    num_validation_examples: int = 0
    chooses_microbatches: bool = False
    chooses_order: bool = False
    num_ranks: int = 1  # GPU workers of each box
    chooses_ranks: bool = False
    # The first one gets the first blocks; the planner orders the others. Of equal ones, it takes earlier ones.
    boxes: tuple[RequestedBox, ...]
    num_boxes: int | None = None  # of them that the job is to have, the first one among them; None: all
    network_bytes_per_s: float | None = None  # between the boxes, each way; None: it is not known

    def __post_init__(self) -> None:
        """Refuses boxes that no job can have."""
        names = [box.name for box in self.boxes]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"a job over several boxes has two at least, each once, and not {', '.join(names)}")
        if self.num_boxes is not None and not 2 <= self.num_boxes <= len(names):
            raise ValueError(f"num_boxes is {self.num_boxes}; it must be 2 to {len(names)}, or None")
        if self.network_bytes_per_s is not None and not self.network_bytes_per_s > 0:
            raise ValueError(f"network_bytes_per_s is {self.network_bytes_per_s}; it must be above 0, or None")

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "StagesRequest":
        """Converts JSON values to a request. Raises ValueError if they are not those of a request."""
        return _REQUEST.validate_python(stored)

    def to_json(self) -> dict[str, Any]:
        """Returns the request as JSON values."""
        values: dict[str, Any] = _REQUEST.dump_python(self, mode="json")
        return values

    @property
    def number(self) -> int:
        """The number of boxes that the job is to have."""
        return len(self.boxes) if self.num_boxes is None else self.num_boxes

    def on(self, box: RequestedBox, hardware: Hardware) -> PlanRequest:
        """Returns the request for the job on one of the boxes. Nothing can be measured on a box that may be another."""
        return PlanRequest(
            model_dir=self.model_dir,
            hardware=hardware,
            training=self.training,
            chooses_microbatches=self.chooses_microbatches,
            chooses_order=self.chooses_order,
            dataset_dir=self.dataset_dir,
            num_validation_examples=self.num_validation_examples,
            num_ranks=self.num_ranks,
            chooses_ranks=self.chooses_ranks,
            num_optimizers=box.num_optimizers,
            host_memory_nbytes=box.host_memory_nbytes,
            device_memory_nbytes=box.device_memory_nbytes,
            may_measure=False,
        )


_REQUEST = TypeAdapter(StagesRequest)
