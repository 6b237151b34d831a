"""Profiles models by tensor shapes alone. It reads no weights, and computes or allocates nothing."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from windlass.engine.activations import OperatorCost
from windlass.engine.memory_estimate import DryRun
from windlass.engine.memory_plan import ATTENTION
from windlass.engine.model import BlockRunner, ModelLayout, Partition, build_meta_model
from windlass.planner.cost import BlockProfile, LayerProfile, ModelProfile, OperatorProfile
from windlass.storage.ids import BlockIndex, HeadSlices, Precision

if TYPE_CHECKING:  # `windlass.planner.hardware.model_shape` needs pydantic, which the GPU check does without
    from windlass.planner.hardware import ModelShape

# Tokens: the width to which an attention kernel on a GPU pads. Source: torch's memory-efficient attention, `kAlignLSE`.
_PADDED_TOKENS = 32


def config_of_shape(shape: "ModelShape", *, num_tokens: int) -> Any:
    """Returns a transformers config with these sizes, without dropout.

    Sequences have up to `num_tokens` tokens, or as many as the shape gives.
    """
    if shape.is_gpt:
        return GPT2Config(
            n_layer=shape.num_layers,
            n_embd=shape.hidden_size,
            n_head=shape.num_heads,
            vocab_size=shape.vocab_size,
            n_positions=shape.max_tokens or num_tokens,
            activation_function="gelu_pytorch_tanh",  # the tanh approximation in one operator, as in other systems
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            tie_word_embeddings=shape.is_tied,
        )
    kind = Qwen2Config if shape.qkv_bias else Qwen3Config if shape.qk_norm else LlamaConfig
    return kind(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads or shape.num_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.intermediate_size or 4 * shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_tokens or num_tokens,
        tie_word_embeddings=shape.is_tied,
    )


def profile_config(
    config: Any, precision: Precision, *, num_examples: int, num_tokens: int, device: str = "cpu"
) -> ModelProfile:
    """Profiles the model of a transformers config; see `Profiler`."""
    return Profiler(config, precision, device=device).profile(num_examples, num_tokens)


def kinds_of_layers(partition: Partition) -> list[tuple[BlockIndex, ...]]:
    """Groups layers whose params have the same shapes."""
    kinds: dict[object, list[BlockIndex]] = {}
    for block in map(BlockIndex, range(1, partition.head)):
        layout = partition.layout.blocks[block]
        prefix = len(layout.name)
        kinds.setdefault(tuple((param.name[prefix:], param.shape) for param in layout.params), []).append(block)
    return [tuple(blocks) for blocks in kinds.values()]


class Profiler:
    """Profiles one model for micro-batches of any shape.

    `device`: runs the shapes there, because operators choose their kernels by device. `for_gpu`: the job will run on a
    GPU even if `device` is a CPU, so attention outputs are counted for a GPU. Layers whose params have the same shapes
    are profiled once. `head_slices`: the way in which the job's head goes over tokens.
    """

    def __init__(
        self,
        config: Any,
        precision: Precision,
        *,
        device: str = "cpu",
        for_gpu: bool = False,
        head_slices: HeadSlices = HeadSlices.LARGE,
    ) -> None:
        self._for_gpu, self._head_slices = for_gpu, head_slices
        self._hidden_size = config.get_text_config().hidden_size
        self._partition = Partition(build_meta_model(config, precision))
        self._runner = BlockRunner(self._partition, torch.device(device), seed=0)
        self._itemsize = next(self._partition.model.parameters()).element_size()
        # A second partition for dry runs. They make their own runners, and a partition must have one runner only.
        self.rehearsed = Partition(build_meta_model(config, precision))

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model's blocks."""
        return self._partition.layout

    def profile(self, num_examples: int, num_tokens: int) -> ModelProfile:
        """Returns the profile for micro-batches of `num_examples` x `num_tokens` tokens."""
        partition, layout = self._partition, self._partition.layout
        peaks = self._peaks(num_examples, num_tokens)
        layers: dict[int, LayerProfile] = {}
        for blocks in kinds_of_layers(partition):
            layers.update(dict.fromkeys(blocks, self._layer(blocks[0], num_examples, num_tokens, peaks[blocks[0]])))
        matrices = [site.param.numel for site in partition.sites[partition.head] if len(site.param.shape) == 2]
        return ModelProfile(
            name=partition.name,
            num_examples=num_examples,
            num_tokens=num_tokens,
            embedding=BlockProfile(numel=layout.blocks[0].numel, num_flops=0, peak_nbytes=peaks[0]),
            layers=tuple(layers[block] for block in sorted(layers)),
            head=BlockProfile(
                numel=layout.blocks[partition.head].numel,
                num_flops=2 * sum(matrices) * num_examples * num_tokens,
                peak_nbytes=peaks[partition.head],
            ),
            shared=layout.shared,
            chunk_numel=layout.chunk_numel,
        )

    def _peaks(self, num_examples: int, num_tokens: int) -> list[int]:
        """Returns the peak device bytes of each block's operations, with full recomputation."""
        dtype = next(self.rehearsed.model.parameters()).dtype
        rehearsal = DryRun(self.rehearsed, {}, grad_dtype=dtype, is_summed=False, head_slices=self._head_slices)
        units, head_peak_nbytes = rehearsal.units(num_examples, num_tokens)
        return [*(max(unit.forward_peak_nbytes, unit.backward_peak_nbytes) for unit in units), head_peak_nbytes]

    def _layer(self, block: BlockIndex, num_examples: int, num_tokens: int, peak_nbytes: int) -> LayerProfile:
        cost = self._runner.operators(block, num_examples, num_tokens)
        return LayerProfile(
            numel=self._partition.layout.blocks[block].numel,
            num_flops=sum(operator.num_flops for operator in cost.operators),
            peak_nbytes=peak_nbytes,
            saves_input=cost.saves_input,
            input_nbytes=num_examples * num_tokens * self._hidden_size * self._itemsize,
            largest_param_numel=max(param.numel for param in self._partition.layout.blocks[block].params),
            operators=tuple(
                OperatorProfile(
                    name=operator.name,
                    outputs_nbytes=self._outputs_nbytes(operator, num_tokens),
                    num_flops=operator.num_flops,
                    is_saved=operator.is_saved,
                    reads=operator.reads,
                )
                for operator in cost.operators
            ),
        )

    def _outputs_nbytes(self, operator: OperatorCost, num_tokens: int) -> tuple[int, ...]:
        if not self._for_gpu or not operator.name.startswith(f"{ATTENTION}#"):
            return operator.outputs_nbytes
        # On a GPU, some kernels pad the tokens of their second output, which has sums for each head.
        output, *others = operator.outputs_nbytes
        padded = -(-num_tokens // _PADDED_TOKENS) * _PADDED_TOKENS
        return output, *(-(-nbytes // num_tokens) * padded for nbytes in others)
