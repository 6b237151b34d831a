"""Checks an architecture before training: compares a tiny model's gradients, block by block, with plain autograd."""

import contextlib
import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from windlass.engine.activations import ActivationStore, HostActivations
from windlass.engine.device import TORCH_DTYPE, Device, TensorArena
from windlass.engine.memory_plan import RECOMPUTE_ALL, BlockActivations, in_words
from windlass.engine.model.block_runner import BlockRunner, random_key
from windlass.engine.model.fused_kernels import apply_kernels, check_fused_loss
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.head_slices import IGNORED_TARGET
from windlass.engine.model.layout import UnsupportedArchitectureError
from windlass.engine.model.partition import Partition, build_meta_model, find_layers
from windlass.engine.model.streaming import StreamedFlats
from windlass.engine.optimizer import KernelUnavailable
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BlockIndex, ModelKernel, Precision
from windlass.storage.memory import ALIGNMENT_NBYTES, SlotPool

# The tiny model's sizes; attributes that a config lacks are ignored.
_TINY_SIZES = {
    "num_hidden_layers": 3,
    "n_layer": 3,
    "num_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "n_embd": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": 96,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 16,
    "sliding_window": 8,
}
# Elements of the parts of a tiny model's matrices. Many rows and columns are no multiples of a part's.
_CUT_NUMEL = 1000
_NUM_MICROBATCHES = 2  # because the first one holds nothing in layers with Python autograd functions
_SHAPE = (2, 16)  # examples, tokens
_STORE_NBYTES = 64 * 2**20  # far more than a tiny model swaps; untouched memory costs nothing
_DEADLINE_S = 60.0  # timeout of each wait for the store
# Tolerances of gradients with other kernels than PyTorch's, relative to their norms.
_KERNEL_TOLERANCES = {Precision.FP32: 1e-3, Precision.BF16: 0.1, Precision.FP16: 0.03}
# Lower limit of a norm for that comparison, relative to the largest norm.
_LEAST_NORM = 0.05
# Relative to a gradient's largest element. With one thread most architectures agree bit by bit, but matrix products of
# other shapes may sum in another order.
_TOLERANCE = 1e-5
# Relative to the largest element of all gradients. Some gradients are zero but for rounding, such as that of a bias of
# keys, which a softmax leaves out.
_NOISE = 1e-9


def tiny_config(config: Any) -> Any:
    """Returns a config of the same class with every size reduced."""
    tiny = copy.deepcopy(config)
    for name, size in _TINY_SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            with contextlib.suppress(AttributeError):  # a property derived from other sizes, without a setter
                setattr(tiny, name, min(size, value))
    if isinstance(getattr(config, "layer_types", None), list):
        # One layer of each type, in order of appearance, so that every type is checked.
        kinds = list(dict.fromkeys(config.layer_types))
        tiny.layer_types = kinds + [kinds[-1]] * max(0, 3 - len(kinds))
        tiny.num_hidden_layers = len(tiny.layer_types)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(getattr(config, name, None), int):
            setattr(tiny, name, min(getattr(config, name), tiny.vocab_size - 1))
    return tiny


def check_architecture(
    config: Any,
    choices: Collection[BlockActivations] = (RECOMPUTE_ALL,),
    is_streamed: bool = False,
    is_cut: bool = False,
    streams_ends: bool = False,
) -> None:
    """Raises UnsupportedArchitectureError if training block by block gives other gradients than plain autograd.

    `choices`: the policies to check, each for all layers. Several are checked, because a Python autograd function that
    keeps a tensor without `save_for_backward` may work with one policy and fail with another. `is_streamed`: the
    layers' params come in pieces, and released buffers are filled with NaN. `is_cut`: matrices are computed in parts.
    `streams_ends`: params of embedding and head come in pieces, too.
    """
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    with_choice = ""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tiny = tiny_config(config)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny, dtype=torch.float32, trust_remote_code=False).train()
        batch = [torch.randint(1, tiny.vocab_size, _SHAPE) for _ in range(_NUM_MICROBATCHES)]
        targets = [ids.roll(-1, 1) for ids in batch]
        for target in targets:
            target[:, -1] = IGNORED_TARGET
        expected = _plain_gradients(model, batch, targets)
        for choice in choices:
            ways = [] if choice == RECOMPUTE_ALL else [f"activations {in_words(choice)}"]
            ways += ["streamed_blocks"] if is_streamed else []
            ways += ["cut_matrices"] if is_cut else []
            ways += ["streams_ends"] if streams_ends else []
            with_choice = f" with {' and '.join(ways)}" if ways else ""
            partition = Partition(build_meta_model(tiny, Precision.FP32))
            params = _params_of(model)
            layout = partition.layout
            streamed = [block.index for block in layout.blocks] if is_streamed else []
            ends = streamed if len(layout.shared[-1]) == 1 else streamed[:-1]  # a tied head has no matrix of its own
            found = _gradients_with(
                choice,
                partition,
                params,
                batch,
                targets,
                streamed=ends if streams_ends else streamed[1:-1],
                cut_matrices=_CUT_NUMEL if is_cut else None,
            )
            if (differing := _first_differing(expected, found)) is not None:
                raise UnsupportedArchitectureError(
                    f"{name} is not supported{with_choice}: block by block it computes other gradients than as a "
                    f"whole, first at {differing}"
                )
    except UnsupportedArchitectureError:
        raise
    except Exception as error:
        raise UnsupportedArchitectureError(
            f"{name} cannot be checked{with_choice}: a tiny model of its class failed with {type(error).__name__}: "
            f"{error}"
        ) from error
    finally:
        torch.set_num_threads(num_threads)


def check_kernels(
    config: Any,
    kernels: Collection[ModelKernel],
    precision: Precision,
    device: torch.device,
    choices: Collection[BlockActivations] = (RECOMPUTE_ALL,),
) -> None:
    """Raises KernelUnavailable if a tiny model's gradients with these kernels differ from those with PyTorch's own.

    Rounding differences are allowed. Liger's loss is also compared with PyTorch's at the model's own vocabulary.
    `device`: the device of the job. `choices`: the policies to check, each for all layers.
    """
    names = " and ".join(kernels)
    try:
        tiny = tiny_config(config)
        torch.manual_seed(0)
        dtype = TORCH_DTYPE[precision]
        model = AutoModelForCausalLM.from_config(tiny, dtype=dtype, trust_remote_code=False).to(device).train()
        batch = [torch.randint(1, tiny.vocab_size, _SHAPE).to(device) for _ in range(_NUM_MICROBATCHES)]
        targets = [ids.roll(-1, 1) for ids in batch]
        tolerance = _KERNEL_TOLERANCES[precision]
        if ModelKernel.LIGER_CROSS_ENTROPY in kernels:
            for target in targets:
                target[:, -1] = IGNORED_TARGET  # which the kernel computes in a way of its own
            check_fused_loss(config.vocab_size, dtype, device, tolerance)
        expected = _plain_gradients(model, batch, targets)
        for choice in choices:
            partition = Partition(build_meta_model(tiny, precision))
            apply_kernels(partition.model, kernels)
            params = _params_of(model)
            found = _gradients_with(choice, partition, params, batch, targets, kernels=kernels)
            if (differing := _first_far_off(expected, found, tolerance)) is not None:
                raise KernelUnavailable(f"with {names} a tiny model has other gradients, first at {differing}")
    except KernelUnavailable:
        raise
    except Exception as error:
        raise KernelUnavailable(f"a tiny model with {names} failed with {type(error).__name__}: {error}") from error


def _first_far_off(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], tolerance: float
) -> str | None:
    """Returns the first parameter whose gradients differ by more than `tolerance` of their norm, or hold NaN."""
    norms = {name: float(grad.float().norm()) for name, grad in expected.items()}
    least = _LEAST_NORM * max(norms.values())  # because much smaller gradients consist of rounding errors
    for name in found:
        grad = expected[name]
        if not float((found[name].float() - grad.float()).norm()) <= tolerance * max(norms[name], least):
            return name
    return None


def _first_differing(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> str | None:
    """Returns the first parameter whose gradients differ by more than rounding, None if there is none."""
    largest = max((float(grad.abs().max()) for grad in expected.values()), default=0.0)
    for param in found:
        grad = expected[param]
        scale = float(grad.abs().max()) or 1.0
        if not torch.allclose(found[param], grad, rtol=0.0, atol=max(_TOLERANCE * scale, _NOISE * largest)):
            return param
    return None


def _plain_gradients(model: Any, batch: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Returns the gradients of plain autograd, with the same random seeds as the block runner."""
    _, layers = find_layers(model)
    num_targets = sum(int((target != IGNORED_TARGET).sum()) for target in targets)
    for m, (ids, target) in enumerate(zip(batch, targets, strict=True)):

        def seed(block: int, m: int = m) -> Any:
            return lambda *_: torch.manual_seed(random_key(0, 1, m, block)) and None

        hooks = [layer.register_forward_pre_hook(seed(i + 1)) for i, layer in enumerate(layers)]
        hooks.append(layers[-1].register_forward_hook(seed(len(layers) + 1)))
        torch.manual_seed(random_key(0, 1, m, 0))
        logits = model(input_ids=ids, use_cache=False).logits.float()
        for hook in hooks:
            hook.remove()
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
        torch.autograd.backward(loss / num_targets)
    params = _params_of(model)
    return {name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in params.items()}


def _params_of(model: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters by each of their names.

    PyTorch lists a shared one by the name that was registered first, and a layout by that in the first block.
    """
    return dict(model.named_parameters(remove_duplicate=False))


def _gradients_with(
    choice: BlockActivations,
    partition: Partition,
    params: Mapping[str, nn.Parameter],
    batch: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    *,
    streamed: Sequence[BlockIndex] = (),
    cut_matrices: int | None = None,
    kernels: Collection[ModelKernel] = (),
) -> dict[str, torch.Tensor]:
    """Returns the block runner's gradients with one policy for all layers, and with a store like a job's.

    `streamed`: the blocks whose params come in pieces.
    """
    memory = torch.empty(_STORE_NBYTES if choice.swaps else 0, dtype=torch.uint8)
    token = CancelToken(_DEADLINE_S)
    slots = SlotPool(0, ALIGNMENT_NBYTES, memory.nbytes // ALIGNMENT_NBYTES, name="activation slots", token=token)
    device = Device(batch[0].device, token=token)
    store = HostActivations(device, TensorArena(memory), slots, max_leaving_nbytes=_STORE_NBYTES)
    layers = [BlockIndex(b) for b in range(1, len(partition.layers) + 1)]
    streams = None
    if streamed:
        poisoning = Device(batch[0].device, poison_released=True, token=token)
        streams = StreamedFlats(partition, streamed, poisoning, cut_matrices=cut_matrices)
    activations = dict.fromkeys(layers, choice)
    try:
        return block_gradients(
            partition,
            params,
            batch,
            targets,
            seed=0,
            step=1,
            activations=activations,
            store=store,
            streams=streams,
            kernels=kernels,
            cut_matrices=cut_matrices,
        )
    finally:
        token.cancel()


def block_gradients(
    partition: Partition,
    params: Mapping[str, nn.Parameter],
    batch: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    *,
    seed: int,
    step: int,
    activations: Mapping[BlockIndex, BlockActivations] | None = None,
    store: ActivationStore | None = None,
    streams: StreamedFlats | None = None,
    kernels: Collection[ModelKernel] = (),
    cut_matrices: int | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the gradients of one step, computed block by block. For models that fit in memory."""
    layout = partition.layout
    runner = BlockRunner(
        partition,
        batch[0].device,
        seed,
        activations=activations,
        store=store,
        kernels=kernels,
        cut_matrices=cut_matrices,
    )
    grads = {
        block.index: GradBuffer(torch.empty(block.numel, dtype=torch.float32, device=batch[0].device))
        for block in layout.blocks
    }

    def lend(block: BlockIndex, *, with_grads: bool) -> dict[BlockIndex, torch.Tensor]:
        flats = {}
        for index in layout.shared[block]:
            parts = [params[param.name].detach().reshape(-1) for param in layout.blocks[index].params]
            flats[index] = torch.cat(parts) if parts else torch.empty(0)
        lent = flats if streams is None else streams.of(flats)
        runner.install(block, lent, {index: grads[index] for index in flats} if with_grads else {})
        return flats

    def release(block: BlockIndex, flats: dict[BlockIndex, torch.Tensor]) -> None:
        runner.remove(block)
        for flat in flats.values():
            flat.fill_(float("nan"))  # so that a late read shows in the result

    blocks = [block.index for block in layout.blocks]
    for block in blocks[:-1]:
        flats = lend(block, with_grads=False)
        runner.forward(block, step, batch)
        release(block, flats)
    flats = lend(partition.head, with_grads=True)
    runner.head(step, targets)
    release(partition.head, flats)
    for block in reversed(blocks[:-1]):
        flats = lend(block, with_grads=True)
        runner.backward(block, step, batch)
        release(block, flats)
    result = {}
    for layout_block in layout.blocks:
        buffer = grads[layout_block.index]
        buffer.finish(layout.grad_parts(layout_block.index, cut_matrices))
        for param in layout_block.params:
            result[param.name] = buffer.flat[param.offset : param.offset + param.numel].view(param.shape)
    return result
