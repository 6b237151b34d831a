"""A machine in this process with links, SSDs and compute slowed down to declared rates, to compare the simulator with.

It works as `throttle.py`, but for each product and copy, so that layers wait while they compute.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.scheduler.throttle import Gate, Throttle, sleep_until
from windlass.actors.activations import tiered_store as activation_tiers
from windlass.actors.gpu_worker import param_prefetcher
from windlass.actors.gpu_worker import worker as gpu_worker
from windlass.engine.activations import host_store as activations_host
from windlass.engine.device import device
from windlass.engine.model import BlockRunner, Partition
from windlass.engine.model.streaming import params as param_pieces_on_device

_COPYING = (activations_host, device, param_prefetcher)  # copies of several tensors go through `device`
_copy = device.copy


class SlowMachine:
    """Maximum rates. The product of a param with a token takes twice as long backward as forward."""

    def __init__(
        self,
        *,
        products_per_s: float,
        h2d_bytes: float,
        d2h_bytes: float,
        ssd_bytes: float | None = None,
        optimizer_params: float | None = None,
    ) -> None:
        """`products_per_s`: of matrix elements with tokens. `ssd_bytes`: per second, of each SSD.

        `optimizer_params`: updated per second. None: not slowed down.
        """
        self._products_per_s = products_per_s
        self._due_s = 0.0  # time at which all products so far would be done on this machine
        self._links = {True: Gate(d2h_bytes), False: Gate(h2d_bytes)}
        self._throttle = Throttle(ssd_bytes_per_s=ssd_bytes, optimizer_params_per_s=optimizer_params)
        # Bytes of each tensor that was swapped, by step and block.
        self.swapped: dict[tuple[int, int], list[int]] = defaultdict(list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Slows down the jobs that run in this process within the context."""
        tiers, pieces = activation_tiers.ActivationTiers, param_pieces_on_device.PieceBuffers
        put = tiers.put

        def noting(store: Any, tensor: torch.Tensor) -> Any:
            self.swapped[store._watch.owner()].append(tensor.nbytes)
            return put(store, tensor)

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._throttle.holding_back())
            for module in _COPYING:
                stack.enter_context(patch.object(module, "copy", self._copy))
            stack.enter_context(patch.object(gpu_worker, "BlockRunner", self._runner()))
            for owner, name, call in ((tiers, "put", noting), (tiers, "get", tiers.get), (pieces, "hold", pieces.hold)):
                stack.enter_context(patch.object(owner, name, self._waiting(call)))
            yield

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # The arena is larger than any storage on the device.
        is_out = target.untyped_storage().nbytes() > source.untyped_storage().nbytes()
        with self._links[is_out].passing(target.nbytes):
            _copy(target, source)

    def _runner(self) -> type[BlockRunner]:
        machine = self

        class SlowRunner(BlockRunner):
            def __init__(self, partition: Partition, *arguments: Any, **options: Any) -> None:
                for module in partition.model.modules():
                    if isinstance(module, nn.Linear):
                        module.register_forward_pre_hook(machine._begin)
                        module.register_forward_hook(machine._end)
                super().__init__(partition, *arguments, **options)

            def install(self, *arguments: Any) -> None:
                machine._due_s = time.monotonic()
                super().install(*arguments)

        return SlowRunner

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a call in which a computing thread may wait. The waiting time does not count as compute."""

        def wait(*arguments: Any, **options: Any) -> Any:
            start_s = time.monotonic()
            try:
                return call(*arguments, **options)
            finally:
                self._due_s += time.monotonic() - start_s

        return wait

    def _begin(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """Starts a module. Its backward pass ends when the gradient of its own view of the input is known."""
        assert isinstance(module, nn.Linear)
        (entering,) = inputs
        entering = entering.view_as(entering)
        if entering.requires_grad:
            products = entering.numel() * module.out_features
            entering.register_hook(lambda _: self._pass(2 * products))  # type: ignore[no-untyped-call]
        return (entering,)

    def _end(self, module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        assert isinstance(module, nn.Linear)
        self._pass(output.numel() * module.in_features)

    def _pass(self, products: int) -> None:
        """Waits until the products would be done. If they took longer by themselves, does not wait."""
        self._due_s += products / self._products_per_s
        sleep_until(self._due_s)
