"""Swaps storages off the device between the forward and the backward pass of one block and micro-batch."""

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from windlass.engine.activations.store import ActivationStore, SwapHandle


class UnitSwaps:
    """The storages that one block of one micro-batch has put into the store: each storage and version once."""

    def __init__(self, store: ActivationStore | None) -> None:
        self._store = store
        # A weak reference keeps the address of a storage from being reused, but does not keep its memory.
        self._known: dict[tuple[StorageWeakRef, int], SwappedStorage] = {}
        self._waiting: dict[SwapHandle, None] = {}

    def swap_out(self, tensor: torch.Tensor) -> "SwappedView":
        """Puts a tensor's storage into the store unless it is there. Keeps no reference to the tensor."""
        storage = tensor.untyped_storage()
        key = (StorageWeakRef(storage), tensor._version)  # type: ignore[no-untyped-call]
        if key not in self._known:
            assert self._store is not None
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            handle = self._store.put(whole)
            self._waiting[handle] = None
            self._known[key] = SwappedStorage(self, handle)
        return SwappedView(
            self._known[key], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.device
        )

    def seal(self) -> None:
        """Ends the forward pass. From here on a swapped storage lives as long as a SwappedView refers to it."""
        self._known.clear()

    def prefetch(self, *, latest_first: bool) -> None:
        """Starts to copy all swapped storages back, in the order of `swap_out` or in the reverse."""
        for handle in reversed(self._waiting) if latest_first else self._waiting:
            assert self._store is not None
            self._store.prefetch(handle)

    def fetch(self, handle: SwapHandle) -> torch.Tensor:
        """Returns the bytes on the device. May be called once for each handle."""
        assert self._store is not None
        del self._waiting[handle]
        return self._store.get(handle)

    def drop(self, handle: SwapHandle) -> None:
        """Discards the bytes of a handle. Does nothing if they were fetched."""
        if handle in self._waiting:
            assert self._store is not None
            del self._waiting[handle]
            self._store.drop(handle)

    def drop_all(self) -> None:
        """Discards all bytes that are still in the store."""
        for handle in list(self._waiting):
            self.drop(handle)


class SwappedStorage:
    """A storage in the store. After its return to the device it lives as long as the views of it."""

    def __init__(self, swaps: UnitSwaps, handle: SwapHandle) -> None:
        self._swaps = swaps
        self._handle = handle
        self._back: torch.Tensor | None = None

    def storage(self) -> torch.UntypedStorage:
        """Returns the storage on the device; the first call fetches it."""
        if self._back is None:
            self._back = self._swaps.fetch(self._handle)
        return self._back.untyped_storage()

    def drop(self) -> None:
        """Discards the stored bytes."""
        self._swaps.drop(self._handle)


@dataclass(frozen=True, slots=True)
class SwappedView:
    """Describes a tensor whose storage is in the store."""

    swapped: SwappedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the start of the storage
    device: torch.device

    def tensor(self) -> torch.Tensor:
        """Returns the original tensor on the device; fetches its storage if needed."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(self.swapped.storage(), self.offset, self.shape, self.stride)
