"""The boxes that the command `plan` plans one job over, and the printing of these plans."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from windlass.amounts import GB, number_text
from windlass.planner.hardware import Hardware
from windlass.service.cli import OptionError, print_columns
from windlass.service.cli.plan.inputs import MEASURED
from windlass.service.validation import MAX_BOXES
from windlass.storage.ids import HEAD_NAME

if TYPE_CHECKING:
    from windlass.planner.stages import StagesReport

_BYTES_PER_GBIT = 1e9 / 8
_NOTES = (
    "planned by the cost model, not measured; `windlass submit --boxes` spreads a job over boxes that have joined",
    "waits: the share of a step in which the busiest box waits for other boxes. blocks: 0 is the embedding, the last "
    "one is the head",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Equal boxes."""

    name: str  # as the user gave it
    number: int
    hardware: Hardware
    has_measured_network: bool = False

    def with_measured(self, gb_per_s: float) -> "Boxes":
        """Returns these boxes with a network of this rate, which was measured."""
        hardware = self.hardware.model_copy(update={"network_gb_per_s": gb_per_s})
        return replace(self, hardware=hardware, has_measured_network=True)


def asked_boxes(
    hardware: Sequence[str] | None, boxes: Sequence[str] | None
) -> tuple[Sequence[str], Sequence[int] | None]:
    """Returns the name of each kind of boxes, and the number of each, None without --boxes.

    Raises:
        OptionError: --boxes is neither numbers nor the names of boxes, or they are more than a job may have.
    """
    if boxes is None:
        return hardware or [MEASURED], None
    if all(text.isdecimal() and 1 <= int(text) <= MAX_BOXES for text in boxes):
        numbers = [int(text) for text in boxes]
        _check_number(sum(numbers))
        return hardware or [MEASURED], numbers
    names = [name.strip() for text in boxes for name in text.split(",")]
    if any(not name or name[0] in "+-" or name.isdecimal() for name in names) or len(set(names)) < len(names):
        raise OptionError(
            f"--boxes: {', '.join(boxes)} is neither a number from 1 to {MAX_BOXES} nor names of boxes, each once, "
            "such as head,attic"
        )
    if hardware:
        raise OptionError("--boxes: names say which machines they are; leave out --hardware, or give numbers")
    _check_number(len(names))
    return [MEASURED if name == HEAD_NAME else name for name in names], [1] * len(names)


def _check_number(number: int) -> None:
    if number > MAX_BOXES:
        raise OptionError(f"--boxes: {number} boxes in all; a job has at most {MAX_BOXES}")


def boxes_of(
    machines: Sequence[tuple[str, Hardware]],
    numbers: Sequence[int] | None,
    *,
    network_gbit_per_s: float | None,
    measured_gb_per_s: Callable[[], float | None],
    others: Mapping[str, object],
) -> list[Boxes]:
    """Checks the options about boxes, and returns the boxes of each kind.

    `machines`: the names and profiles of all kinds. `measured_gb_per_s`: returns the rate of the network, if neither an
    option nor the hardware tells it. `others`: values of options that plans over boxes have not.

    Raises:
        OptionError: the options do not go together. The text names one of them.
    """
    if numbers is None:
        if len(machines) > 1:
            raise OptionError("--hardware: several kinds of boxes; add --boxes as often, with the number of each")
        if network_gbit_per_s is not None:
            raise OptionError("--network: one box sends nothing; add --boxes with the number of boxes")
        numbers = [1]
    else:
        if len(numbers) != len(machines):
            raise OptionError(
                f"--boxes: {len(numbers)} numbers for {len(machines)} kinds of boxes; give one for each --hardware"
            )
        for option, value in others.items():
            if value:
                raise OptionError(f"{option}: it is about one box; leave it out, or --boxes")
    network = {} if network_gbit_per_s is None else {"network_gb_per_s": network_gbit_per_s * _BYTES_PER_GBIT / GB}
    kinds = [
        Boxes(name=name, number=number, hardware=hardware.model_copy(update=network))
        for (name, hardware), number in zip(machines, numbers, strict=True)
    ]
    if sum(numbers) > 1 and any(kind.hardware.network_gb_per_s is None for kind in kinds):
        if (measured := measured_gb_per_s()) is None:
            raise OptionError(
                "--network: the rate between boxes is not known; give it in Gbit/s, such as 10, or measure it on the "
                "head with `windlass doctor --network`"
            )
        kinds = [kind.with_measured(measured) if kind.hardware.network_gb_per_s is None else kind for kind in kinds]
    return kinds


def print_plans_over_boxes(
    kinds: Sequence[Boxes],
    plans: "Sequence[StagesReport]",
    lacks: Sequence[str],
    warnings: Sequence[str],
    *,
    shape: str | None,
    as_json: bool,
) -> None:
    """Prints the plans, which are sorted by step time, in words or as one JSON object.

    `lacks`: if there are none, what each box lacks. `shape`: the name of a published shape that is planned.
    """
    notes = [*_NOTES, *_network_note(kinds), *_boxes_note(kinds), *_formula_note(plans), *_slower_note(plans)]
    if as_json:
        about = {"lacks": lacks, "notes": notes, "shape": shape, "warnings": warnings}
        print(json.dumps({"plans": [asdict(plan) for plan in plans], **about}, indent=2))
        return
    for warning in warnings:
        print(f"! {warning}")
    if not plans:
        print("it does not fit on any number of these boxes")
        for lack in lacks or ["it is close to their memory: add memory, or one more box"]:
            print(f"  {lack}")
        return
    one = min((plan.step_s for plan in plans if len(plan.boxes) == 1), default=None)
    rows: list[tuple[str, ...]] = [
        ("boxes", "step, s", "of one", "tokens a second", "bound by", "waits", "network, s", "GPUs", "groups", "blocks")
    ]
    rows += [_row(plan, one) for plan in plans]
    print_columns(rows)
    for note in notes:
        print(note)


def _network_note(kinds: Sequence[Boxes]) -> Iterator[str]:
    for kind in kinds:
        if kind.has_measured_network:
            rate = kind.hardware.network_gb_per_s
            yield f"network: {rate:.3g} GB/s, the slowest that `windlass doctor --network` has measured between boxes"
            return


def _boxes_note(kinds: Sequence[Boxes]) -> Iterator[str]:
    if any(kind.name == MEASURED and kind.number > 1 for kind in kinds):
        yield "all boxes are taken to be like this machine; --hardware names others, and --boxes the number of each"


def _formula_note(plans: "Sequence[StagesReport]") -> Iterator[str]:
    by_formula = [boxes_in_words(plan) for plan in plans if not plan.is_simulated]
    if by_formula:
        yield f"steps are simulated, but for {'; '.join(by_formula)}: these are by a formula, and may be too short"


def _slower_note(plans: "Sequence[StagesReport]") -> Iterator[str]:
    """Names the plans that are slower than one with some of their boxes, by more than a percent."""
    slower = []
    for plan in plans:
        names = Counter(box.hardware for box in plan.boxes)
        for other in plans:
            some = Counter(box.hardware for box in other.boxes)
            # Simulated steps and those by the formula do not compare.
            if some < names and 1.01 * other.step_s < plan.step_s and other.is_simulated == plan.is_simulated:
                slower.append(f"{boxes_in_words(plan)} than {boxes_in_words(other)}")
                break
    if slower:
        yield f"slower with more boxes: {'; '.join(slower)}: submit the job over fewer"


def _row(plan: "StagesReport", one_s: float | None) -> tuple[str, ...]:
    numbers = [str(box.gpus) for box in plan.boxes]
    return (
        boxes_in_words(plan),
        f"{number_text(plan.step_s, 4)}",
        "-" if one_s is None else f"{one_s / plan.step_s:.2f}x",
        f"{number_text(plan.tokens_per_s, 4)}",
        plan.bound_by,
        "-" if len(plan.boxes) == 1 else f"{plan.waiting_share:.0%}",
        f"{plan.network_s:.2g}",
        ", ".join(dict.fromkeys(numbers) if len(set(numbers)) == 1 else numbers),
        f"{-(-plan.num_microbatches // plan.group_size)} of {plan.group_size}",
        ", ".join(f"{box.first_block}-{box.last_block}" for box in plan.boxes),
    )


def boxes_in_words(plan: "StagesReport") -> str:
    """Names the boxes in the order of their blocks: "2 rtx4090, 1 rtx3090"."""
    names: list[Any] = [box.hardware for box in plan.boxes]
    return ", ".join(f"{len(list(same))} {name}" for name, same in groupby(names))
