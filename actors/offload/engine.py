"""The engine of an offloaded model: fetches params for its layers, collects their gradients, and starts updates."""

import atexit
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from windlass.actors.offload.config import Hyper, OffloadConfig, OffloadStatistics, plan_offload
from windlass.actors.offload.errors import OffloadClosedError, OffloadMisuseError, OffloadToken
from windlass.actors.offload.layer import OffloadedLayer
from windlass.actors.offload.layers import OffloadedBlock, OffloadedParameter, WrappedParam, outside_params
from windlass.actors.offload.param_prefetcher import ParamFeed
from windlass.actors.offload.resident_params import OutsideParams
from windlass.actors.offload.store import OffloadStore
from windlass.actors.offload.updates import BlockUpdate, LayerUpdates, Run
from windlass.actors.policy import StepResult, TrainerState, clip_scale
from windlass.engine.device import TORCH_DTYPE, Device, memory_node
from windlass.engine.model import GradBuffer, choose_chunk_numel
from windlass.engine.optimizer import MOMENTS, KernelSet, SavedStates, from_saved, to_saved
from windlass.storage.ids import BlockIndex, ChunkKey, Formats, Kernel, Precision, Span, StateKind, StatePrecision, Step
from windlass.storage.threads import CancellableThreads

_NAME = "windlass.offload"  # of the threads, in errors


class OffloadEngine:
    """Runs one offloaded model. All calls must come from the training thread."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[OffloadedBlock],
        config: OffloadConfig,
        hyper_of: Callable[[str], Hyper | None],
    ) -> None:
        """Offloads the states block by block, frees each block's original params, and then wraps the layers.

        `hyper_of` returns the optimizer's present settings for a parameter of the layers, by name. It returns None if
        the optimizer does not have the parameter.
        """
        self.config = config
        self.blocks = blocks
        self.device = config.chosen_device
        self._hyper_of = hyper_of
        self._token = OffloadToken(config.deadline_s)
        self._threads = CancellableThreads(
            _NAME, _NAME, self._token, lambda error, _: self._token.fail(error), deadline_s=config.deadline_s
        )
        self._closed = False
        self._layers: list[OffloadedLayer] = []
        self.num_steps = 0
        is_fp16 = any(param.dtype is torch.float16 for param in model.parameters())
        self.trainer = TrainerState(scales_loss=is_fp16)
        # Clipping and the check for overflows need all gradients before the first update.
        self._needs_norm = is_fp16 or config.clip_norm is not None
        self._has_scaled = False  # a loss was scaled since the last step
        self._grads: dict[BlockIndex, GradBuffer] = {}  # gradients being computed
        self._touched: dict[BlockIndex, set[str]] = {}  # params with a gradient in this step
        self._num_backwards: Counter[BlockIndex] = Counter()  # backward passes in this step
        self._begun: dict[BlockIndex, dict[str, Hyper]] = {}  # settings of the updates that this step has started
        self._num_updates: Counter[str] = Counter()  # updates so far, by param
        torch.get_num_threads()  # fixes this thread's number before other threads set theirs
        with self._threads.stopped_on_error():
            self._device = Device(
                self.device,
                poison_released=config.poison_released,
                token=self._token,
                start_threads=self._threads.start,
            )
            self._open_store(blocks)
            self._start(model)

    # --- calls of the layers (ParamLender) --------------------------------------------------------------------------

    def borrow(self, block: OffloadedBlock, *, is_backward: bool) -> torch.Tensor:
        """Returns the block's flat parameters on the device, valid until `give_back`."""
        self._require_open()
        if self._begun and not is_backward:
            raise OffloadMisuseError(
                f"{block.name} was called between the backward and the step, when layers are being updated already; "
                "set backwards_per_step of `windlass.offload` to the number of backwards before each step, or "
                "call the model after the step"
            )
        return self._feed.borrow(block, is_backward=is_backward)

    def give_back(self, block: OffloadedBlock) -> None:
        """Releases a block's parameters."""
        self._feed.give_back(block)

    def grads(self, block: OffloadedBlock) -> GradBuffer:
        """Returns the buffer in which a block's gradients are summed."""
        if block.index in self._begun:
            raise OffloadMisuseError(
                f"a second backward reached {block.name} before the step, when its update had begun; set "
                "backwards_per_step of `windlass.offload` to the number of backwards before each step"
            )
        if block.index not in self._grads:
            self._grads[block.index] = GradBuffer(self._device.take(block.numel, self._feed.dtype))
        return self._grads[block.index]

    def backward_done(self, block: OffloadedBlock, *, is_last: bool) -> None:
        """Offloads a block's gradient after the backward of its last open call.

        In the step's last backward pass, the update starts at once, unless the step needs the norm of all gradients.
        """
        if not is_last:
            return
        grads = self._grads.pop(block.index)
        if not grads.touched:
            self._device.give(grads.flat)
            return
        grads.finish(
            [
                *((param.name, param.offset, param.numel) for param in block.params),
                *((f"padding at {offset}", offset, numel) for offset, numel in block.paddings()),
            ]
        )
        self._num_backwards[block.index] += 1
        self._touched.setdefault(block.index, set()).update(grads.touched)
        update = None
        is_complete = self._num_backwards[block.index] >= self.config.backwards_per_step
        if is_complete and not self._needs_norm:
            update = self._updated(block, grad_scale=1.0)
        self._updates.offload(block, grads.flat, update)

    # --- calls of the optimizer -------------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss of an fp16 model multiplied by the loss scale, and any other loss unchanged."""
        if not self.trainer.scales_loss:
            return loss
        self._has_scaled = True
        return loss * torch.tensor(self.trainer.next_loss_scale, dtype=torch.float32, device=loss.device)

    def step(self, outside: Mapping[nn.Parameter, Hyper]) -> float | None:
        """Updates all parameters with gradients; returns the gradient norm before clipping, if the step needs it.

        Updates of layers continue in the background. With loss scaling, a step whose gradients are not all finite is
        skipped. Raises OffloadMisuseError.
        """
        self._require_open()
        for index in list(self._grads):  # layers with an open call that had no backward
            self.backward_done(self.blocks[index], is_last=True)
        for hyper in self._begun.values():
            for name, used in hyper.items():
                if self._hyper_of(name) != used:
                    raise OffloadMisuseError(
                        f"the learning rate or another setting of {name} was changed between the backward and the "
                        "step, when its update had begun; change it after the step"
                    )
        self._outside.check_grads()
        norm, scale = None, 1.0 / self.trainer.next_loss_scale
        if self._needs_norm:
            norm = math.sqrt(self._updates.squared_norm() + self._outside.squared_norm()) * scale
        if self.trainer.scales_loss and not self._may_update(norm):
            self._discard_grads()
            return norm
        if self.config.clip_norm is not None and norm is not None:
            scale *= clip_scale(self.config.clip_norm, norm)
        pending = [block for block in self.blocks if block.index in self._touched and block.index not in self._begun]
        if pending:
            self._updates.await_grads()
        for block in pending:  # in this order, because the next forward pass needs the first blocks first
            self._updates.update(self._updated(block, grad_scale=scale))
        for param, now in outside.items():
            self._outside.update(param, now.settings, now.learning_rate, scale)
        self._begin_step()
        self.num_steps += 1
        self._feed.prefetch(frozenset())
        return norm

    def zero_grad(self) -> None:
        """Discards all gradients. Raises OffloadMisuseError if updates with them have begun."""
        self._require_open()
        if self._begun:
            raise OffloadMisuseError(
                "zero_grad() was called between the backward and the step, when layers are being updated already; set "
                "backwards_per_step of `windlass.offload` to more than 1, or clip_norm, to be able to drop gradients"
            )
        self._discard_grads()

    # --- reading and closing ----------------------------------------------------------------------------------------

    def read_params(self, block: OffloadedBlock) -> dict[str, torch.Tensor]:
        """Returns copies of a layer's parameters after the last step, by name, in host memory."""
        self._require_open()
        self._feed.await_unchanging(block.index)
        flat = torch.empty(block.numel, dtype=self._feed.dtype)
        for key in block.chunk_keys(self._store.chunk_numel):
            start, stop = block.chunk_range(key, self._store.chunk_numel)
            with self._feed.host_chunk(key) as params:
                flat[start:stop].copy_(params)
        return {param.name: flat[param.offset : param.stop].view(param.shape).clone() for param in block.params}

    def read_states(self, block: OffloadedBlock, put: Callable[[WrappedParam, int, SavedStates], None]) -> None:
        """Reads the states of a layer's updated parameters, and passes them on in parts of any size.

        `put` takes the parameter, the part's first element, and states that it must copy.
        """
        self._require_no_update("the states were read")
        self._feed.await_unchanging(block.index)
        for key in block.chunk_keys(self._store.chunk_numel):
            with self._updates.states(block, key) as states:
                for param, first, part in self._parts(block, key, states):
                    if self._num_updates[param.name]:
                        put(param, first, to_saved(self.formats, part))

    def outside_states(self) -> dict[str, SavedStates]:
        """Returns the states of the updated parameters outside of the layers, by name. They must be copied."""
        self._require_no_update("the states were read")
        return self._outside.states()

    def load_states(
        self,
        num_updates: Mapping[str, int],
        get: Callable[[OffloadedBlock, WrappedParam, int, int], SavedStates | None],
        outside: Mapping[str, SavedStates],
    ) -> None:
        """Replaces the states of all parameters, by name. States that are not given keep their values.

        `get` returns a number of elements of a parameter's states, from an element on. For None, the moments become
        zero. Parameters outside of the layers have their states in `outside`, or moments of zero.
        """
        self._require_no_update("states were loaded")
        step = Step(self.num_steps + 1)
        for block in self.blocks:
            if not any(self._num_updates[param.name] or num_updates.get(param.name) for param in block.params):
                continue
            self._feed.await_unchanging(block.index)
            self._feed.block(block.index)
            try:
                for key in block.chunk_keys(self._store.chunk_numel):
                    with self._updates.states(block, key, write_as=step) as states:
                        for param, first, part in self._parts(block, key, states):
                            zeros = {kind: torch.zeros_like(part[kind]) for kind in MOMENTS}
                            saved = get(block, param, first, len(zeros[MOMENTS[0]]))
                            from_saved(self.formats, part, zeros if saved is None else saved)
                self._updates.await_writes()
            finally:
                self._feed.unblock(block.index)
        self._outside.load_states(outside, num_updates)
        inside = {param.name for block in self.blocks for param in block.params}
        self._num_updates = Counter({name: num for name, num in num_updates.items() if name in inside})
        self.num_steps += 1  # a backward pass through an earlier forward pass would see other parameters

    def name_of(self, param: torch.Tensor) -> str:
        """Returns the name in the model of a parameter or of a layer's stand-in."""
        return param.windlass_name if isinstance(param, OffloadedParameter) else self._outside.name_of(param)

    @property
    def num_updates(self) -> dict[str, int]:
        """The number of updates of each parameter that was updated, by name."""
        inside = {name: num for name, num in self._num_updates.items() if num}
        return {**inside, **self._outside.num_updates}

    @property
    def statistics(self) -> OffloadStatistics:
        """The traffic and the memory so far."""
        self._require_open()
        return OffloadStatistics(
            ssd_read_nbytes=self._store.bytes_read,
            ssd_written_nbytes=self._store.bytes_written,
            num_layers_fetched=self._feed.num_moves,
            arena_nbytes=self._plan.arena_nbytes,
            num_host_layers=len(self._plan.host_blocks),
        )

    def close(self) -> None:
        """Ends the threads and releases memory and SSD space. The layers' parameters are lost. Idempotent.

        Raises:
            TimeoutError: a thread hangs. The memory stays mapped, because the thread may still use it.
        """
        self._closed = True
        self._threads.stop()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _open_store(self, blocks: Sequence[OffloadedBlock]) -> None:
        """Plans the buffers and reserves memory and SSD space."""
        config = self.config
        dtype = blocks[0].params[0].stand_in.dtype
        precision = next(precision for precision, known in TORCH_DTYPE.items() if known is dtype)
        formats = Formats(precision, StatePrecision("fp32" if precision is Precision.FP32 else config.state_precision))
        chunk_numel = config.chunk_numel or choose_chunk_numel([block.numel for block in blocks])
        self.formats = formats
        self._plan = plan_offload(
            blocks, formats, chunk_numel, config, keep_grads=self._needs_norm or config.backwards_per_step > 1
        )
        host_keys = (key for index in self._plan.host_blocks for key in blocks[index].chunk_keys(chunk_numel))
        host_slots = self._plan.host_states.slots_of(host_keys)
        offsets = formats.offsets(chunk_numel)
        kernels = KernelSet(
            formats, dtype, None if config.kernel is None else Kernel(config.kernel), config.chosen_kernel_dir
        )
        for name in (param.name for block in blocks for param in block.params):
            if (hyper := self._hyper_of(name)) is not None:
                kernels.of(hyper.settings)  # compiled now, so that an error occurs before anything is reserved
        self._store = OffloadStore(
            [Path(directory) for directory in config.ssd_dirs],
            formats=formats,
            chunk_numel=chunk_numel,
            chunks_per_block=tuple(len(block.chunk_keys(chunk_numel)) for block in blocks),
            arena_dir=Path(config.arena_dir),
            arena_nbytes=self._plan.arena_nbytes,
            node=memory_node(self.device),
            direct_io=config.direct_io,
            token=self._token,
        )
        self._token.describe_pending = self._store.describe_pending
        self._threads.resources.callback(self._store.close)
        self._make_workers(kernels, host_slots, offsets)

    def _make_workers(
        self, kernels: KernelSet, host_slots: dict[ChunkKey, Span], offsets: dict[StateKind, int]
    ) -> None:
        config, blocks = self.config, self.blocks
        self._feed = ParamFeed(
            blocks,
            self._store,
            self._device,
            self._plan.params,
            host_slots,
            offsets[self._store.formats.param_kind],
        )
        self._threads.resources.callback(self._feed.close)
        self._updates = LayerUpdates(
            blocks,
            self._store,
            self._feed,
            self._device,
            self._plan,
            kernels,
            host_slots,
            offsets,
            num_threads=config.num_optimizer_threads,
            with_norms=self._needs_norm,
        )

    def _start(self, model: nn.Module) -> None:
        """Starts the threads and changes the model; nothing of it was changed before."""
        self._device.pin(self._store.arena.memory)
        self._threads.resources.callback(self._device.unpin, self._store.arena.memory)
        self._threads.start((*self._feed.loops, *self._updates.loops))
        atexit.register(self.close)
        self._threads.resources.callback(atexit.unregister, self.close)
        for block in self.blocks:
            originals = {param.name: _param_at(*param.sites[0]) for param in block.params}
            self._updates.load(block, originals)
            block.install({})
            for original in originals.values():  # frees the memory even if the caller still holds the parameter
                original.data = torch.empty(0, dtype=original.dtype)
        self._outside = OutsideParams(
            outside_params(model, self.blocks), StatePrecision(self.config.state_precision), self.device
        )
        _move_buffers(model, self.device)
        self._layers = [OffloadedLayer(block, self) for block in self.blocks]

    def _require_open(self) -> None:
        if self._closed:
            raise OffloadClosedError("the model was closed, and the parameters of its layers are gone")

    def _require_no_update(self, what: str) -> None:
        self._require_open()
        if self._begun:
            raise OffloadMisuseError(
                f"{what} between the backward and the step, when layers are being updated already; do it after the step"
            )

    def _parts(
        self, block: OffloadedBlock, key: ChunkKey, states: Mapping[StateKind, torch.Tensor]
    ) -> Iterator[tuple[WrappedParam, int, dict[StateKind, torch.Tensor]]]:
        """Yields the parameters in a chunk: each with its first element there, and its part of the states."""
        start, stop = block.chunk_range(key, self._store.chunk_numel)
        for param in block.params:
            first, last = max(start, param.offset), min(stop, param.stop)
            if first < last:
                part = {kind: state[first - start : last - start] for kind, state in states.items()}
                yield param, first - param.offset, part

    def _may_update(self, norm: float | None) -> bool:
        """Checks the gradients of a scaled loss, and ends the step for the loss scale."""
        if not self._has_scaled and (self._touched or self._outside.has_grads):
            raise OffloadMisuseError(
                "the loss of a model in fp16 was not scaled; write `optimizer.scale(loss).backward()` for "
                "`loss.backward()`"
            )
        self._has_scaled = False
        is_finite = norm is None or math.isfinite(norm)
        self.trainer.end_step(StepResult.UPDATED if is_finite else StepResult.SKIPPED)
        return is_finite

    def _discard_grads(self) -> None:
        for grads in self._grads.values():
            self._device.give(grads.flat)
        if self._touched:
            self._updates.drop_grads()
        self._outside.drop_grads()
        self._begin_step()

    def _begin_step(self) -> None:
        self._grads.clear()
        self._touched.clear()
        self._num_backwards.clear()
        self._begun.clear()

    def _updated(self, block: OffloadedBlock, *, grad_scale: float) -> BlockUpdate:
        """Records and returns the update of a block: its params with gradients, as runs of equal settings."""
        runs: list[Run] = []
        used: dict[str, Hyper] = {}
        for param in block.params:
            hyper = self._hyper_of(param.name)
            if hyper is None or param.name not in self._touched[block.index]:
                continue
            used[param.name] = hyper
            self._num_updates[param.name] += 1
            run = Run(
                param.offset, param.padded_stop, hyper.settings, hyper.learning_rate, self._num_updates[param.name]
            )
            joined = runs[-1].joined(run) if runs else None
            if joined is not None:
                runs[-1] = joined
            else:
                runs.append(run)
        self._begun[block.index] = used
        return BlockUpdate(block, Step(self.num_steps + 1), tuple(runs), grad_scale)


def _param_at(module: nn.Module, attribute: str) -> nn.Parameter:
    param = module._parameters[attribute]
    assert param is not None, "it existed when the layers were laid out"
    return param


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the original is held so that its id stays unique
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), (buffer, buffer.to(device)))[1]
