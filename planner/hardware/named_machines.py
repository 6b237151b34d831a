"""Machines by name: published ones, and ordinary desktop boxes in several sizes."""

import difflib
import itertools
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from windlass.planner.hardware.hardware import Count, Gpus, Hardware, Host, Pcie, Rate, Ssds, example_machines
from windlass.planner.hardware.yaml_files import Part, load

_DESKTOPS_FILE = Path(__file__).parent / "desktops.yaml"
# Operations per second of a card that is not known, over those of the card that is there.
_FASTER_CARD_RATIO = 2.0
# Share of what SSDs read one by one: a combined limit above it is the SSDs' own, one below that of what they share.
_OWN_LIMIT = 0.9


class Card(Part):
    """A graphics card. `pcie`: generation of its link."""

    name: str
    memory_gib: Rate
    tflops: Rate
    pcie: Annotated[int, Field(ge=1, le=9)]


class Drives(Part):
    """The rates and capacity of one of a desktop's SSDs."""

    read_gb_per_s: Rate
    write_gb_per_s: Rate
    capacity_gib: Rate
    combined_gb_per_s: Rate | None = None


class Desktops(Part):
    """The sizes of desktop boxes: cards from the slowest to the fastest, and parts by number or by GB of RAM."""

    cards: dict[str, Card]
    pcie: dict[int, dict[Count, Pcie]]  # by generation and number of GPUs
    host: dict[Count, Host]  # by GB of RAM
    ssds: dict[Count, Drives]

    def sizes(self, card: Card) -> dict[str, list[int]]:
        """Returns the values that each part of a name may have; the first is meant if a name leaves it out."""
        return {"gpus": list(self.pcie[card.pcie]), "ram": list(self.host), "ssds": list(self.ssds)}

    def machine(self, card: Card, *, gpus: int, ram: int, ssds: int) -> Hardware:
        """Returns the profile of one box."""
        return Hardware(
            gpus=Gpus(count=gpus, memory_gib=card.memory_gib, tflops=card.tflops, name=card.name),
            host=self.host[ram],
            pcie=self.pcie[card.pcie][gpus],
            ssds=_ssds_of(ssds, self.ssds[ssds]),
        )


def desktop_sizes() -> dict[str, dict[str, list[int]]]:
    """Returns the values that each part of a desktop's name may have, by card; the first is meant if it is left out."""
    return {name: desktops().sizes(card) for name, card in desktops().cards.items()}


class UnknownMachineError(ValueError):
    """No machine has this name. The text says which part of the name is wrong, and what there is."""


@cache
def desktops() -> Desktops:
    """Returns the desktop boxes that ship with windlass."""
    return load(Desktops, _DESKTOPS_FILE)


def machine_of(name: str) -> Hardware:
    """Returns a published machine, or a desktop box such as `rtx4090:gpus=2,ram=128,ssds=2`.

    Raises:
        UnknownMachineError: the name is neither.
    """
    first, colon, rest = name.partition(":")
    card = desktops().cards.get(first)
    if card is None:
        published = example_machines()
        if first not in published:
            near = difflib.get_close_matches(first, [*published, *desktops().cards], n=2)
            guess = f"did you mean {' or '.join(near)}? " if near else ""
            raise UnknownMachineError(f"no machine is named {first}; {guess}{machines_in_words()}")
        if colon:
            raise UnknownMachineError(f"{name}: {first} has one size; only {', '.join(desktops().cards)} have others")
        return load(Hardware, published[first])
    if colon and not rest:
        raise UnknownMachineError(f"{name}: nothing follows the colon; write {_example(first, card)}")
    return desktops().machine(card, **_sizes_of(name, card, rest))


def _sizes_of(name: str, card: Card, text: str) -> dict[str, int]:
    allowed = desktops().sizes(card)
    sizes = dict[str, int]()
    for item in text.split(",") if text else ():
        key, equals, value = item.partition("=")
        if key not in allowed or not equals:
            raise UnknownMachineError(
                f"{name}: {item!r} is not one of {', '.join(f'{each}=…' for each in allowed)}, as in "
                f"{_example(name.partition(':')[0], card)}"
            )
        if key in sizes:
            raise UnknownMachineError(f"{name}: {key} is given twice")
        if value not in map(str, allowed[key]):
            raise UnknownMachineError(f"{name}: {key} is {value!r}; there are {', '.join(map(str, allowed[key]))}")
        sizes[key] = int(value)
    return {key: values[0] for key, values in allowed.items()} | sizes


def _example(first: str, card: Card) -> str:
    return f"{first}:{','.join(f'{key}={values[-1]}' for key, values in desktops().sizes(card).items())}"


def machines_in_words() -> str:
    """Lists the names of machines, for help texts and errors."""
    cards = desktops().cards
    sizes = "; ".join(
        f"{key}={'|'.join(map(str, values))}" for key, values in desktops().sizes(next(iter(cards.values()))).items()
    )
    return (
        f"there are the published {', '.join(sorted(example_machines()))}, and desktops with {', '.join(cards)}, in "
        f"sizes as rtx4090:gpus=2,ram=128,ssds=2 ({sizes}; ram in GB)"
    )


def with_faster_card(gpus: Gpus) -> Gpus:
    """Returns the GPUs as the next faster of the known cards, or with twice the operations per second.

    The rate grows in the ratio of the two known cards', because the given one may have been measured.
    """
    cards = list(desktops().cards.values())
    for card, faster in itertools.pairwise(cards):
        if gpus.name is not None and gpus.name.endswith(card.name.removeprefix("NVIDIA ")):
            update = {"memory_gib": max(faster.memory_gib, gpus.memory_gib), "name": faster.name}
            return gpus.model_copy(update={**update, "tflops": gpus.tflops * faster.tflops / card.tflops})
    return gpus.model_copy(update={"tflops": _FASTER_CARD_RATIO * gpus.tflops, "name": None})


def with_one_more_gpu(hardware: Hardware) -> Hardware:
    """Returns a machine with the next number of GPUs.

    A desktop that ships with windlass has the lanes that its board then gives to each. On another machine the new GPU
    has a link like the others'.
    """
    gpus = hardware.gpus
    for card in desktops().cards.values():
        links = desktops().pcie[card.pcie]
        larger = [count for count in links if count > gpus.count]
        if card.name == gpus.name and links.get(gpus.count) == hardware.pcie and larger:
            gpus = gpus.model_copy(update={"count": larger[0]})
            return hardware.model_copy(update={"gpus": gpus, "pcie": links[larger[0]]})
    return hardware.model_copy(update={"gpus": gpus.model_copy(update={"count": gpus.count + 1})})


def with_more_ssds(hardware: Hardware, number: int) -> Hardware:
    """Returns a machine with so many SSDs more.

    A desktop that ships with windlass has the rates of its larger size. On another machine the limit on all SSDs
    together grows with their number only if it is the SSDs' own. Else it is that of a link which they share.
    """
    ssds, known = hardware.ssds, desktops().ssds
    count = ssds.count + number
    if count in known and ssds == _ssds_of(ssds.count, known[ssds.count]):
        return hardware.model_copy(update={"ssds": _ssds_of(count, known[count])})
    update: dict[str, float | None] = {"count": count}
    if ssds.combined_gb_per_s is not None and _is_own_limit(ssds):
        update["combined_gb_per_s"] = ssds.combined_gb_per_s * count / ssds.count
    return hardware.model_copy(update={"ssds": ssds.model_copy(update=update)})


def limit_in_words(ssds: Ssds, more: Ssds) -> str:
    """Says that more SSDs keep the limit on all of them together, for the end of a phrase; "" if they do not."""
    limit = more.combined_gb_per_s
    return "" if limit is None or limit != ssds.combined_gb_per_s else f" (together at most {limit:g} GB/s, as now)"


def _is_own_limit(ssds: Ssds) -> bool:
    """Returns whether the limit on all SSDs together is what each of them does alone."""
    assert ssds.combined_gb_per_s is not None, "there is a limit"
    return ssds.count == 1 or ssds.combined_gb_per_s >= _OWN_LIMIT * ssds.count * ssds.read_gb_per_s


def _ssds_of(count: int, drives: Drives) -> Ssds:
    return Ssds(count=count, **drives.model_dump())
