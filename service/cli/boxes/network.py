"""`windlass doctor --network`: measures the network between the boxes, and prints what it does."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from windlass.amounts import GB
from windlass.service.cli import CommandError, print_columns
from windlass.service.cluster.head import NetworkCheck, NetworkEnd, PairRates, ProbeError, pairs_of
from windlass.service.installation import Settings, open_client
from windlass.storage.sql import Database

_Pair = tuple[NetworkEnd, NetworkEnd]


@dataclass(slots=True)
class _Found:
    """The results of all pairs."""

    rates: list[tuple[_Pair, PairRates]] = field(default_factory=list)
    problems: list[tuple[_Pair, str]] = field(default_factory=list)


def check_network(settings: Settings, *, forced: bool, as_json: bool) -> bool:
    """Measures all pairs of boxes that are ready, and prints the rates. Returns whether all could be measured.

    `forced`: also boxes on which jobs run, whose steps then take longer for some seconds.

    Raises:
        CommandError: there are no two boxes to measure.
    """
    with open_client(settings) as client:
        boxes = client.boxes()
    left_out = {box["name"]: why for box in boxes if (why := _why_left_out(box, forced=forced)) is not None}
    ends = [
        NetworkEnd(id=box["id"], name=box["name"], host=box["link_host"])
        for box in boxes
        if box["name"] not in left_out
    ]
    if len(boxes) < 2:
        raise CommandError("no box has joined this head; `windlass node code` prints the commands for one")
    if len(ends) < 2:
        told = "".join(f"; {name} is left out: {why}" for name, why in left_out.items())
        raise CommandError(f"there are no two boxes whose network could be measured{told}")
    # The service may have got the address when it was started, as an option.
    settings = settings.model_copy(update={"link_host": boxes[0]["link_host"]})
    found = _Found()
    with closing(Database(settings.database_url)) as database:
        _measure(NetworkCheck(settings, database), pairs_of(ends), found, tells=not as_json)
    if as_json:
        print(json.dumps(_shown(found, left_out), indent=2))
    else:
        _print(found, left_out)
    return not found.problems


def _why_left_out(box: dict[str, Any], *, forced: bool) -> str | None:
    if box["state"] != "ready":
        return f"it is {box['state']}"
    if box["jobs"]["running"]["total"] and not forced:
        return "jobs run there, and would be slower meanwhile; --force measures it all the same"
    return None


def _measure(check: NetworkCheck, pairs: Sequence[_Pair], found: _Found, *, tells: bool) -> None:
    for number, (one, other) in enumerate(pairs, 1):
        if tells:
            print(f"{number} of {len(pairs)}: {one.name} and {other.name}", flush=True)
        try:
            found.rates.append(((one, other), check.measure(one, other)))
        except ProbeError as error:
            found.problems.append(((one, other), str(error)))
            if tells:
                print(f"! {error}", flush=True)


def _print(found: _Found, left_out: dict[str, str]) -> None:
    rows = [
        (
            one.name,
            other.name,
            *(f"{rate / GB:.3g} GB/s" for rate in _both(rates)),
            f"{rates.round_trip_s * 1e3:.2f} ms",
        )
        for (one, other), rates in found.rates
    ]
    if rows:
        print_columns([("box", "other box", "there", "back", "round trip"), *rows])
        print("measured with the link that jobs over several boxes use; kept for plans")
    for name, why in left_out.items():
        print(f"{name} was left out: {why}")


def _shown(found: _Found, left_out: dict[str, str]) -> dict[str, Any]:
    measured = [
        {
            "box": one.name,
            "other_box": other.name,
            "there_bytes_per_s": rates.there_bytes_per_s,
            "back_bytes_per_s": rates.back_bytes_per_s,
            "round_trip_s": rates.round_trip_s,
        }
        for (one, other), rates in found.rates
    ]
    problems = [{"box": one.name, "other_box": other.name, "problem": why} for (one, other), why in found.problems]
    skipped = [{"box": name, "reason": why} for name, why in left_out.items()]
    return {"measured_at": int(time.time()), "pairs": measured, "problems": problems, "left_out": skipped}


def _both(rates: PairRates) -> tuple[float, float]:
    return rates.there_bytes_per_s, rates.back_bytes_per_s
