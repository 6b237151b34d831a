"""The request for a plan of one job over boxes, with its JSON for the planner's process."""

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
    num_ranks: int | None = None  # GPU workers for which it has room, if they are fewer than the request's


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRate:
    """The rate of the network from a box to another one, as it was measured."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    source: str
    target: str
    bytes_per_s: float


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
    chooses_cut: bool = False
    chooses_order: bool = False
    num_ranks: int = 1  # GPU workers of each box that has room for so many
    chooses_ranks: bool = False
    # The first one gets the first blocks; the planner orders the others. Of equal ones, it takes earlier ones.
    boxes: tuple[RequestedBox, ...]
    num_boxes: int | None = None  # of them that the job is to have, the first one among them; None: all
    rates: tuple[PairRate, ...] = ()  # of the network between boxes, as far as they are known; others are ignored

    def __post_init__(self) -> None:
        """Refuses boxes that no job can have."""
        names = [box.name for box in self.boxes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a job has one box at least, and each once, and not {', '.join(names) or 'none'}")
        if self.num_boxes is not None and not 1 <= self.num_boxes <= len(names):
            raise ValueError(f"num_boxes is {self.num_boxes}; it must be 1 to {len(names)}, or None")
        for rate in self.rates:
            if not rate.bytes_per_s > 0:
                raise ValueError(f"the rate from {rate.source} to {rate.target} is {rate.bytes_per_s}; it must be > 0")

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

    def rate_between(self, box: str, other: str) -> float | None:
        """Returns the rate between two boxes in bytes per second, of the slower way; None: it is not known."""
        rates = (rate.bytes_per_s for rate in self.rates if {rate.source, rate.target} == {box, other})
        return min(rates, default=None)

    def rate_of(self, box: str) -> float | None:
        """Returns the rate of a box's network card in bytes per second, by its fastest pair; None: it is not known.

        The other card of a slower pair limits that one.
        """
        others = {rate.source for rate in self.rates} | {rate.target for rate in self.rates}
        rates = (self.rate_between(box, other) for other in others - {box})
        return max((rate for rate in rates if rate is not None), default=None)

    def on(self, box: RequestedBox, hardware: Hardware) -> PlanRequest:
        """Returns the request for the job on one of the boxes. Nothing can be measured on a box that may be another."""
        return PlanRequest(
            model_dir=self.model_dir,
            hardware=hardware,
            training=self.training,
            chooses_microbatches=self.chooses_microbatches,
            chooses_cut=self.chooses_cut,
            chooses_order=self.chooses_order,
            dataset_dir=self.dataset_dir,
            num_validation_examples=self.num_validation_examples,
            num_ranks=self.num_ranks if box.num_ranks is None else box.num_ranks,
            chooses_ranks=self.chooses_ranks,
            num_optimizers=box.num_optimizers,
            host_memory_nbytes=box.host_memory_nbytes,
            device_memory_nbytes=box.device_memory_nbytes,
            may_measure=False,
        )


_REQUEST = TypeAdapter(StagesRequest)
