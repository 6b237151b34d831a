"""Flat buffers of several users that need them at different times, in the same device memory."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from windlass.engine.device.buffer_pool import BufferClass, narrowed
from windlass.engine.device.device import Device
from windlass.engine.device.streams import Event, Stream
from windlass.engine.memory_plan import OVERLAY_ALIGNMENT_NBYTES, overlay_nbytes


class OverlaidBuffers:
    """Each user has buffers of its own, which begin at the start of the same memory.

    A user enters only when all others have left. The thread that queues operations enters all users, in the order in
    which the compute stream uses their buffers. Otherwise there may be a deadlock. The next user's work waits on the
    device for the last work of the others.
    """

    def __init__(self, device: Device, users: Mapping[int | None, Sequence[BufferClass]], *, name: str) -> None:
        """Allocates the memory of the user that needs most. `name`: the buffers' purpose, for errors.

        A user is named by its block, or None: as if it had entered first.
        """
        self._device = device
        self._name = name
        sizes = [[numel * dtype.itemsize for numel, dtype in classes] for classes in users.values()]
        self._memory = torch.empty(overlay_nbytes(sizes), dtype=torch.uint8, device=device.device)
        self.buffers: dict[int | None, list[torch.Tensor]] = {
            user: self._cut(classes) for user, classes in users.items()
        }
        self._changed = threading.Condition()
        self._user: int | None = None  # the last one that has entered
        self._num_entered = 0
        allocated = device.compute.record()
        self._ended: dict[Any, Event] = {None: allocated}  # by key: the end of work that used the memory
        # By id: the user, and its first buffer or the start of that in a smaller dtype.
        self._taken: dict[int, tuple[int | None, torch.Tensor]] = {}

    def _cut(self, classes: Sequence[BufferClass]) -> list[torch.Tensor]:
        buffers, start = [], 0
        for numel, dtype in classes:
            stop = start + numel * dtype.itemsize
            buffers.append(self._memory[start:stop].view(dtype))
            start = -(-stop // OVERLAY_ALIGNMENT_NBYTES) * OVERLAY_ALIGNMENT_NBYTES
        return buffers

    def enter(self, user: int | None) -> list[Event]:
        """Enters a user, once for each `leave`. Returns the events for which its work must wait on the device.

        There are none if it was the last user, which knows its own work.

        Raises the errors of `CancelToken.wait_for`.
        """
        with self._changed:
            what = f"the memory for {self._name} of {user}, which others use; the computation or the copies are stuck"
            self._device.token.wait_for(
                self._changed, lambda: not self._num_entered or self._user == user or None, what
            )
            self._num_entered += 1
            if self._user == user:
                return []
            events, self._ended, self._user = list(self._ended.values()), {}, user
            return events

    def leave(self, events: Mapping[Any, Event]) -> None:
        """Leaves after work that was queued before these events. `events`: by a key of each part of the memory."""
        with self._changed:
            self._ended.update(events)
            self._num_entered -= 1
            self._changed.notify_all()

    def take(self, user: int | None, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Acquires a user's first buffer with undefined contents, for work that is queued on `stream` from now on.

        The user must have released it. Where it is an fp32 buffer, `dtype` may be smaller.

        Raises the errors of `enter`.
        """
        flat = self.buffers[user][0]
        assert flat.numel() == numel, "the first buffer is for the sum"
        for event in self.enter(user):
            stream.wait(event)
        with self._changed:
            assert all(by != user for by, _ in self._taken.values()), f"{user} has one buffer for a sum"
            self._taken[id(flat)] = user, flat
            before = self._ended.get((user, 0))
        if before is not None:
            stream.wait(before)
        return flat if flat.dtype is dtype else self.narrow(flat, dtype)

    def narrow(self, buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the start of an acquired buffer in a smaller dtype. It is released instead of the buffer."""
        view = narrowed(buffer, dtype)
        with self._changed:
            user, _ = self._taken.pop(id(buffer))
            self._taken[id(view)] = user, view
        return view

    def has(self, flat: torch.Tensor) -> bool:
        """Returns whether a buffer was acquired here and not released."""
        return id(flat) in self._taken

    def give(self, flat: torch.Tensor, stream: Stream) -> None:
        """Releases a buffer. Only work that is already queued on `stream` may still use it."""
        with self._changed:
            user, _ = self._taken[id(flat)]
        self._device.poison(self.buffers[user][0], stream)
        unused = stream.record()
        with self._changed:
            del self._taken[id(flat)]
        self.leave({(user, 0): unused})
