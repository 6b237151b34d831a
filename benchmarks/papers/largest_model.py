"""Checks whether a model of a given shape fits a machine: bytes on the device, in host memory, and on the SSDs.

It counts what windlass would allocate: its plan's arena, and its device buffers by the engine's rules. AutoHete's
memory model of the device is here too, for comparison.
"""

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.papers.decoder_sizes import layer_matrices, model_size
from windlass.amounts import GIB
from windlass.engine.memory_plan import (
    LEAVING_ACTIVATION_NBYTES,
    MAX_GRAD_BUFFERS,
    NUM_PIECE_BUFFERS,
    ActivationChoice,
    ModelSize,
    Placement,
    Plan,
    PlanError,
    cut_layers,
    grad_buffers,
    largest_piece,
    make_plan,
    param_buffers,
)
from windlass.engine.slices.slice_sizes import MAX_PIECE_NUMEL, MAX_PRODUCT_NUMEL
from windlass.planner.cost import ModelProfile
from windlass.planner.hardware import ModelShape

# Bytes per logit where all exist at once: bf16 logits, their fp32 copy, and a gradient of each.
_WHOLE_LOGIT_NBYTES = 12
_LOGIT_NBYTES = 4  # bf16 logits of a slice and their gradient
_PIECE_NBYTES = 12  # fp32 logits of a piece of it, their log-softmax and their gradient
_PARAM_NBYTES = 2
_SUM_NBYTES = 4  # fp32: sums over tied params
_STATES_NBYTES = 14  # 16-bit params, fp32 params and moments
# Of these, what is resident on the device; the 16-bit params are derived from the fp32 ones for each use.
_UPDATED_NBYTES = 12
# Estimated bytes of device memory that CUDA and its libraries use.
CONTEXT_NBYTES = GIB // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The bytes on the device by purpose."""

    params: int  # buffers for whole layers or pieces
    grads: int  # buffers
    matrix_grad: int  # gradient of one matrix, or of a part of the head's, before it is added to its buffer
    states: int  # of blocks resident on the device
    activations: int  # of one layer, inputs of layers on their way out, and logits
    context: int = CONTEXT_NBYTES

    @property
    def total(self) -> int:
        """The peak."""
        return self.params + self.grads + self.matrix_grad + self.states + self.activations + self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class BareModel:
    """A shape and its profile for one micro-batch."""

    shape: ModelShape
    profile: ModelProfile
    num_head_tokens: int  # tokens whose logits exist at once

    @property
    def numels(self) -> tuple[int, ...]:
        """The number of parameters of each block."""
        return tuple(block.numel for block in self.profile.blocks)

    @property
    def is_tied(self) -> bool:
        """True if head and embedding share one matrix."""
        return bool(self.profile.shared_blocks)

    @property
    def size(self) -> ModelSize:
        """The sizes for a plan."""
        return model_size(self.numels, chunk_numel=self.profile.chunk_numel, is_tied=self.is_tied)


def device_memory(
    model: BareModel,
    *,
    streams_layers: bool,
    resident: Collection[int] = (),
    num_grad_buffers: int = MAX_GRAD_BUFFERS,
) -> DeviceMemory:
    """Returns the device bytes for one micro-batch. Every layer is recomputed from its input, which leaves the device.

    `streams_layers`: layers are copied in pieces. `resident`: layers whose states are on the device.
    `num_grad_buffers`: maximum number of layers' gradients on the device at once.
    """
    numels, matrices, profile = model.numels, layer_matrices(model.shape), model.profile
    last = len(numels) - 1
    shared = [(block,) for block in range(last)] + [(last, 0) if model.is_tied else (last,)]
    pieces, whole = 0, list(numels)
    if streams_layers:
        (bounds,) = cut_layers([[(numel,) for numel in matrices]])
        pieces = NUM_PIECE_BUFFERS * largest_piece([bounds])
        in_pieces = set(range(1, last)).difference(resident)
        whole = [numel - bounds[-1] if block in in_pieces else numel for block, numel in enumerate(numels)]
    params = param_buffers(whole, shared, resident=(), num_ahead=2)
    num_tokens = profile.num_examples * profile.num_tokens
    is_sliced = num_tokens > model.num_head_tokens
    # Sums over slices of the head, and of a tied matrix, which has one for each use. They are rounded in place.
    summed = [*(shared[-1] if is_sliced else ()), *([0] if model.is_tied and not is_sliced else ())]
    rounded = {block: numel for block, numel in enumerate(numels) if block not in summed}
    grads = grad_buffers(rounded, resident=resident, num_waiting=num_grad_buffers)
    sums = sum(numels[block] for block in summed) + (numels[0] if model.is_tied else 0)
    layer = profile.layers[0]
    num_logits = min(num_tokens, model.num_head_tokens) * model.shape.vocab_size
    return DeviceMemory(
        params=_PARAM_NBYTES * (pieces + _numel(params)),
        grads=_PARAM_NBYTES * _numel(grads) + _SUM_NBYTES * sums,
        matrix_grad=_PARAM_NBYTES
        * max(*matrices, min(MAX_PRODUCT_NUMEL, model.shape.vocab_size * model.shape.hidden_size)),
        states=_UPDATED_NBYTES * sum(numels[block] for block in resident),
        activations=layer.input_nbytes
        + layer.saved_nbytes
        + min(profile.interblock_nbytes, LEAVING_ACTIVATION_NBYTES)
        + _LOGIT_NBYTES * num_logits
        + _PIECE_NBYTES * min(num_logits, MAX_PIECE_NUMEL),
    )


def least_arena_nbytes(size: ModelSize, *, keep_grads: bool, num_optimizers: int) -> int:
    """Returns the smallest host budget with a plan, to a MiB: whole layers, states on the SSDs."""
    low, high = 0, 2 * _STATES_NBYTES * size.total_chunks * size.chunk_numel
    while high - low > 2**20:
        middle = (low + high) // 2
        try:
            _plan(size, Placement(), middle, keep_grads=keep_grads, num_optimizers=num_optimizers)
            high = middle
        except PlanError:
            low = middle
    return high


def fits(
    model: BareModel,
    *,
    device_nbytes: int,
    host_nbytes: int,
    ssd_nbytes: int,
    keep_grads: bool,
    num_optimizers: int,
    num_grad_buffers: int = 1,
) -> bool:
    """Checks whether the model fits with whole or streamed layers, and activations in host memory or on the SSDs."""
    inputs = model.profile.interblock_nbytes
    for streams_layers, on_ssd in itertools.product((False, True), repeat=2):
        device = device_memory(model, streams_layers=streams_layers, num_grad_buffers=num_grad_buffers)
        if device.total > device_nbytes:
            continue
        placement = Placement(
            streamed_blocks=tuple(range(1, len(model.numels) - 1)) if streams_layers else (),
            activations=ActivationChoice.RECOMPUTE_SWAP_INPUT.of_layers(model.shape.num_layers),
            host_activation_nbytes=0 if on_ssd else inputs,
            ssd_activation_nbytes=inputs if on_ssd else 0,
        )
        try:
            plan = _plan(model.size, placement, host_nbytes, keep_grads=keep_grads, num_optimizers=num_optimizers)
        except PlanError:
            continue
        if plan.ssd_nbytes + placement.ssd_activation_nbytes <= ssd_nbytes:
            return True
    return False


def most_resident_layers(model: BareModel, device_nbytes: int) -> int | None:
    """Returns how many of the first layers can have their states on the device; None if it is too small even for 0."""
    for number in range(len(model.numels) - 2, -1, -1):
        need = device_memory(model, streams_layers=False, resident=range(1, number + 1))
        if need.total <= device_nbytes:
            return number
    return None


def autohete_resident_layers(model: BareModel, device_nbytes: int) -> int | None:
    """Computes the same number with AutoHete's memory model, with every layer recomputed and params offloaded with
    states.

    A resident layer takes 12 bytes of states and 2 of 16-bit params per parameter. Outside of the layers are the tied
    embedding in 16 bit, and all logits.

    Source: AutoHete, section 3.2.2, equation 1 with as many layers' params offloaded as states.
    """
    profile = model.profile
    layer, num_layers = profile.layers[0], model.shape.num_layers
    outside = _PARAM_NBYTES * model.numels[0]
    outside += _WHOLE_LOGIT_NBYTES * profile.num_examples * profile.num_tokens * model.shape.vocab_size
    at_least = profile.interblock_nbytes + layer.input_nbytes + layer.saved_nbytes + outside
    at_least += _PARAM_NBYTES * layer.numel  # of the layer that is computed
    number = (device_nbytes - at_least) // (_STATES_NBYTES * layer.numel)
    return None if number < 0 else min(number, num_layers)


def _plan(size: ModelSize, placement: Placement, host_nbytes: int, *, keep_grads: bool, num_optimizers: int) -> Plan:
    return make_plan(
        size,
        num_optimizers=num_optimizers,
        grad_itemsize=_PARAM_NBYTES,
        keep_grads=keep_grads,
        host_memory_nbytes=host_nbytes,
        placement=placement,
    )


def _numel(buffers: Counter[int]) -> int:
    return sum(numel * number for numel, number in buffers.items())
