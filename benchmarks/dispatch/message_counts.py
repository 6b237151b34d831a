"""Counts the messages that an actor sends, by kind and by the step that each message names. Imports no Ray."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.actors.messages import Message
from windlass.actors.runtime.sockets import MessageClient
from windlass.storage.ids import ActorName

COUNTS_FOLDER = "message-counts"  # in the job's folder; one file for each actor
WRITES = "writes to a socket"  # beside the kinds of messages; one write carries one message or several


class CountedClient(MessageClient):
    """A client that counts what it has delivered. Like every client, it belongs to one thread."""

    def __init__(self, addresses: Mapping[ActorName, str]) -> None:
        super().__init__(addresses)
        self._counts: Counter[tuple[str, int]] = Counter()

    def deliver(self, to: ActorName, messages: Sequence[Message]) -> None:
        """Send the messages, then count them. A write counts for the step of its last message."""
        super().deliver(to, messages)
        self._counts.update((type(message).__name__, int(message.step)) for message in messages)
        self._counts[WRITES, int(messages[-1].step)] += 1

    def save(self, job_dir: Path, name: ActorName) -> None:
        """Write the counts of the actor `name` into the job's folder. The caller's outbox is closed, or idle."""
        folder = job_dir / COUNTS_FOLDER
        folder.mkdir(exist_ok=True)
        rows = [(kind, step, number) for (kind, step), number in self._counts.items()]
        (folder / f"{name}.json").write_text(json.dumps(rows))


def read_counts(folder: Path) -> dict[int, Counter[str]]:
    """The counts of all actors together: for each step, how many messages of each kind."""
    counts: dict[int, Counter[str]] = {}
    for path in sorted(folder.glob("*.json")):
        for kind, step, number in json.loads(path.read_text()):
            counts.setdefault(step, Counter())[kind] += number
    return counts
