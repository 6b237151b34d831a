"""Machines by name: published ones, and ordinary desktop boxes in several sizes."""

import difflib
import itertools
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from windlass.planner.hardware.hardware import Count, Gpus, Hardware, Host, Pcie, Rate, Ssds, example_machines
from windlass.planner.hardware.yaml_files import Part, load

_DESKTOPS_FILE = Path(__file__).parent / "desktops.yaml"
_LEAST_RAM_GIB = 16  # of a desktop; the most is the largest listed size
# Operations per second of a card that is not known, over those of the card that is there.
_FASTER_CARD_RATIO = 2.0
_MAKER = "NVIDIA "  # of the known cards
# The forms of a name with a number of GPUs: `2x RTX 4090`, `rtx4090 x2`. The x stands beside a number or a space.
_COUNTED = (
    re.compile(r"(?P<count>[0-9]{1,4})\s*[x×*]\s*(?P<name>.+)", re.IGNORECASE),
    re.compile(r"(?P<name>.+[\s0-9])[x×*]\s*(?P<count>[0-9]{1,4})", re.IGNORECASE),
)
# Share of what SSDs read one by one: a combined limit above it is the SSDs' own, one below that of what they share.
_OWN_LIMIT = 0.9


class Card(Part):
    """A graphics card. `pcie`: generation of its link."""

    name: str
    memory_gib: Rate
    tflops: Rate
    fp32_tflops: Rate
    pcie: Annotated[int, Field(ge=1, le=9)]


class Drives(Part):
    """The rates and capacity of one of a desktop's SSDs."""

    read_gb_per_s: Rate
    write_gb_per_s: Rate
    capacity_gib: Rate
    combined_gb_per_s: Rate | None = None


class Desktops(Part):
    """The sizes of desktop boxes: cards from the slowest to the fastest, and parts by number or by GiB of RAM."""

    cards: dict[str, Card]
    pcie: dict[int, dict[Count, Pcie]]  # by generation and number of GPUs
    host: dict[Count, Host]  # by GiB of RAM
    ssds: dict[Count, Drives]
    ssd_endurance_tbw: Rate  # terabytes that one SSD is rated for

    def sizes(self, card: Card) -> dict[str, list[int]]:
        """Returns the usual values of each part of a name; the first is meant if a name leaves it out."""
        return {"gpus": list(self.pcie[card.pcie]), "ram": list(self.host), "ssds": list(self.ssds)}

    def allows(self, card: Card, part: str, value: int) -> bool:
        """Returns whether a part of a name may have a value. RAM may have sizes that are not listed, too."""
        return self.has_ram(value) if part == "ram" else value in self.sizes(card)[part]

    def allowed_in_words(self, card: Card, part: str) -> str:
        """Names the values that a part of a name may have."""
        if part == "ram":
            return f"a whole number of GiB from {_LEAST_RAM_GIB} to {max(self.host)}"
        return ", ".join(map(str, self.sizes(card)[part]))

    def has_ram(self, gib: float) -> bool:
        """Returns whether a desktop may have so much RAM."""
        return _LEAST_RAM_GIB <= gib <= max(self.host)

    def host_with(self, ram_gib: float) -> Host:
        """Returns the host with so much RAM, at the rates of the least listed size that is as large."""
        size = min(size for size in self.host if size >= ram_gib)
        host = self.host[size]
        return host.model_copy(update={"memory_gib": host.memory_gib + ram_gib - size})

    def machine(self, card: Card, *, gpus: int, ram: int, ssds: int) -> Hardware:
        """Returns the profile of one box."""
        return Hardware(
            gpus=Gpus(
                count=gpus,
                memory_gib=card.memory_gib,
                tflops=card.tflops,
                fp32_tflops=card.fp32_tflops,
                name=card.name,
            ),
            host=self.host_with(ram),
            pcie=self.pcie[card.pcie][gpus],
            ssds=_ssds_of(ssds, self.ssds[ssds]),
        )


def desktop_sizes() -> dict[str, dict[str, list[int]]]:
    """Returns the usual values of each part of a desktop's name, by card; the first is meant if it is left out."""
    return {name: desktops().sizes(card) for name, card in desktops().cards.items()}


class UnknownMachineError(ValueError):
    """No machine has this name. The text says which part of the name is wrong, and what there is."""


class UnknownSizeError(UnknownMachineError):
    """A machine has the first part of the name, but not this size."""


@cache
def desktops() -> Desktops:
    """Returns the desktop boxes that ship with windlass."""
    return load(Desktops, _DESKTOPS_FILE)


def machine_names() -> list[str]:
    """Returns the names of machines: the desktops by their cards, then the published ones."""
    return [*desktops().cards, *sorted(example_machines())]


def machine_name(name: str) -> str:
    """Returns a machine's name as lists have it: `rtx4090:ram=128` for `RTX 4090: ram = 128`.

    Upper case, spaces, hyphens and underscores make no difference, and a card may have its maker's name for it. `2x RTX
    4090` and `rtx4090 x2` have two GPUs, and RAM may have its unit.

    Raises:
        UnknownMachineError: no machine is named so.
    """
    first, sizes = _parts_of(name)
    return first + ":" * bool(sizes) + ",".join(f"{part}={value}" for part, value in sizes.items())


def machine_of(name: str) -> Hardware:
    """Returns a published machine, or a desktop box such as `rtx4090:gpus=2,ram=128,ssds=2`.

    Raises:
        UnknownMachineError: the name is neither; see `machine_name` for the forms of a name.
    """
    first, sizes = _parts_of(name)
    card = desktops().cards.get(first)
    if card is None:
        return load(Hardware, example_machines()[first])
    usual = {part: values[0] for part, values in desktops().sizes(card).items()}
    return desktops().machine(card, **usual | sizes)


def _parts_of(name: str) -> tuple[str, dict[str, int]]:
    """Returns the name of a card or of a published machine, and the sizes that the name gives."""
    asked, colon, rest = name.partition(":")
    first, count = _counted_machine(asked)
    if first is None:
        raise UnknownMachineError(_unknown_machine(asked))
    card = desktops().cards.get(first)
    if card is None:
        if colon or count is not None:
            raise UnknownSizeError(f"{name}: {first} has one size; only {', '.join(desktops().cards)} have others")
        return first, {}
    if colon and not rest.strip():
        raise UnknownSizeError(f"{name}: nothing follows the colon; write {_example(first, card)}")
    items = [*([] if count is None else [f"gpus={count}"]), *(rest.split(",") if rest else ())]
    return first, _sizes_of(name, first, card, items)


def _counted_machine(asked: str) -> tuple[str | None, str | None]:
    """Returns a machine's name as lists have it, and the number before or after it: 2 of `2x RTX 4090`.

    None: no machine is named so, or there is no number.
    """
    known = _names_by_letters()
    if (first := known.get(_letters(asked))) is not None:
        return first, None
    counted = next((found for form in _COUNTED if (found := form.fullmatch(asked.strip())) is not None), None)
    return (None, None) if counted is None else (known.get(_letters(counted["name"])), counted["count"])


def _unknown_machine(asked: str) -> str:
    """Tells that no machine is named so, and what there is."""
    known, letters = _names_by_letters(), _letters(asked)
    if "=" in asked:
        cards = desktops().cards
        first = next((name for name in cards if letters.startswith(name)), next(iter(cards)))
        return f"no machine is named {asked}; sizes follow a colon, as in {_example(first, cards[first])}"
    beginnings = [each for each in known if letters and each.startswith(letters)]
    near = dict.fromkeys(known[each] for each in (*beginnings, *difflib.get_close_matches(letters, known, n=3)))
    guess = f"did you mean {' or '.join(near)}? There" if near else "there"
    return f"no machine is named {asked}; {guess} {_machines_in_words()}"


def _names_by_letters() -> dict[str, str]:
    cards = desktops().cards
    makers = {_letters(card.name.removeprefix(prefix)): key for key, card in cards.items() for prefix in ("", _MAKER)}
    return {_letters(each): each for each in machine_names()} | makers


def _letters(name: str) -> str:
    """Returns a name without upper case and without separators, which users write in different ways."""
    return re.sub(r"[\s_-]", "", name).casefold()


def _sizes_of(name: str, first: str, card: Card, items: Iterable[str]) -> dict[str, int]:
    sizes, parts = dict[str, int](), desktops().sizes(card)
    for item in items:
        part, equals, value = (each.strip() for each in item.casefold().partition("="))
        part = part if part in parts else f"{part}s"  # one GPU, one SSD
        if part not in parts or not equals:
            raise UnknownSizeError(
                f"{name}: {item.strip()!r} is not one of {', '.join(f'{each}=…' for each in parts)}, as in "
                f"{_example(first, card)}"
            )
        if part in sizes:
            raise UnknownSizeError(f"{name}: {part} is given twice")
        number = re.fullmatch(r"([0-9]{1,4})\s*(?:g(?:i?b)?)?" if part == "ram" else r"([0-9]{1,4})", value)
        if number is None or not desktops().allows(card, part, int(number[1])):
            allowed = desktops().allowed_in_words(card, part)
            raise UnknownSizeError(f"{name}: {part}={value} is not possible; {part} may be {allowed}")
        sizes[part] = int(number[1])
    return sizes


def _example(first: str, card: Card) -> str:
    return f"{first}:{','.join(f'{part}={values[-1]}' for part, values in desktops().sizes(card).items())}"


def _machines_in_words() -> str:
    """Lists the names of machines, for errors. It continues "there ..."."""
    cards = desktops().cards
    card = next(iter(cards.values()))
    sizes = "; ".join(f"{part}: {desktops().allowed_in_words(card, part)}" for part in desktops().sizes(card))
    return (
        f"are desktops with {', '.join(cards)}, in sizes as rtx4090:gpus=2,ram=128,ssds=2 ({sizes}), and the published "
        f"machines {', '.join(sorted(example_machines()))}"
    )


def with_faster_card(gpus: Gpus) -> Gpus:
    """Returns the GPUs as the next faster of the known cards, or with twice the operations per second.

    The rate grows in the ratio of the two known cards', because the given one may have been measured.
    """
    cards = list(desktops().cards.values())
    for card, faster in itertools.pairwise(cards):
        if gpus.name is not None and gpus.name.endswith(card.name.removeprefix(_MAKER)):
            memory_gib = max(faster.memory_gib, gpus.memory_gib)
            more = that_compute_faster(gpus, faster.tflops / card.tflops)
            return more.model_copy(update={"memory_gib": memory_gib, "name": faster.name})
    return that_compute_faster(gpus, _FASTER_CARD_RATIO)


def that_compute_faster(gpus: Gpus, ratio: float) -> Gpus:
    """Returns unnamed GPUs that do so many times as many operations per second, in all precisions."""
    fp32_tflops = None if gpus.fp32_tflops is None else ratio * gpus.fp32_tflops
    return gpus.model_copy(update={"tflops": ratio * gpus.tflops, "fp32_tflops": fp32_tflops, "name": None})


def with_one_more_gpu(hardware: Hardware) -> Hardware | None:
    """Returns a machine with the next number of GPUs, or None for a desktop whose board has no place for more.

    A desktop that ships with windlass has the lanes that its board then gives to each. On another machine the new GPU
    has a link like the others'.
    """
    gpus = hardware.gpus
    for card in desktops().cards.values():
        links = desktops().pcie[card.pcie]
        larger = [count for count in links if count > gpus.count]
        if card.name == gpus.name and links.get(gpus.count) == hardware.pcie:
            if not larger:
                return None
            gpus = gpus.model_copy(update={"count": larger[0]})
            return hardware.model_copy(update={"gpus": gpus, "pcie": links[larger[0]]})
    return hardware.model_copy(update={"gpus": gpus.model_copy(update={"count": gpus.count + 1})})


def with_more_ram(hardware: Hardware, gib: float) -> Hardware:
    """Returns a machine with so many GiB of host memory more.

    A desktop that ships with windlass has the rates of its larger size. On another machine the rates stay.
    """
    host, known = hardware.host, desktops()
    listed, smallest = next(iter(known.host.items()))
    ram_gib = host.memory_gib + listed - smallest.memory_gib  # with what the system keeps
    if known.has_ram(ram_gib) and known.has_ram(ram_gib + gib) and host == known.host_with(ram_gib):
        more = known.host_with(ram_gib + gib)
    else:
        more = host.model_copy(update={"memory_gib": host.memory_gib + gib})
    return hardware.model_copy(update={"host": more})


def with_more_ssds(hardware: Hardware, number: int) -> Hardware:
    """Returns a machine with so many SSDs more.

    A desktop that ships with windlass has the rates of its larger size. On another machine the limit on all SSDs
    together grows with their number only if it is the SSDs' own. Else it is that of a link which they share.
    """
    ssds, known = hardware.ssds, desktops().ssds
    count = ssds.count + number
    if count in known and _are_of_desktop(ssds):
        return hardware.model_copy(update={"ssds": _ssds_of(count, known[count])})
    update: dict[str, float | None] = {"count": count}
    if ssds.combined_gb_per_s is not None and _is_own_limit(ssds):
        update["combined_gb_per_s"] = ssds.combined_gb_per_s * count / ssds.count
    return hardware.model_copy(update={"ssds": ssds.model_copy(update=update)})


def limit_in_words(ssds: Ssds, more: Ssds) -> str:
    """Says that more SSDs keep the limit on all of them together, for the end of a phrase; "" if they do not."""
    limit = more.combined_gb_per_s
    return "" if limit is None or limit != ssds.combined_gb_per_s else f" (together at most {limit:g} GB/s, as now)"


def endurance_tbw_of(ssds: Ssds) -> float | None:
    """Returns the terabytes that one SSD is rated for. None: unknown, because they are not those of a desktop."""
    return desktops().ssd_endurance_tbw if _are_of_desktop(ssds) else None


def _are_of_desktop(ssds: Ssds) -> bool:
    known = desktops().ssds
    return ssds.count in known and ssds == _ssds_of(ssds.count, known[ssds.count])


def _is_own_limit(ssds: Ssds) -> bool:
    """Returns whether the limit on all SSDs together is what each of them does alone."""
    assert ssds.combined_gb_per_s is not None, "there is a limit"
    return ssds.count == 1 or ssds.combined_gb_per_s >= _OWN_LIMIT * ssds.count * ssds.read_gb_per_s


def _ssds_of(count: int, drives: Drives) -> Ssds:
    return Ssds(count=count, **drives.model_dump())
