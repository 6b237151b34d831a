"""Profiles models by tensor shapes alone. It reads no weights, and computes or allocates nothing."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from windlass.engine.memory_estimate import TracedFacts, unknown_where
from windlass.engine.model import BlockRunner, ModelLayout, Partition, build_meta_model
from windlass.planner.cost import ModelProfile, OperatorProfile
from windlass.planner.profiling.model_config import UnusableConfigError
from windlass.planner.profiling.profiled_facts import LayerOperators, profile_of
from windlass.storage.ids import BlockIndex, HeadSlices, Precision
from windlass.storage.memory import is_out_of_memory

if TYPE_CHECKING:  # `windlass.planner.hardware.model_shape` needs pydantic, which the GPU check does without
    from windlass.planner.hardware import ModelShape


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


class TracedModel(TracedFacts):
    """Implements `ProfiledFacts` for the model of a transformers config, by running its blocks with fake tensors."""

    def __init__(self, config: Any, precision: Precision, *, device: str = "cpu") -> None:
        """`device`: runs the shapes there, because operators choose their kernels by device."""
        partition = Partition(_built(config, precision))
        super().__init__(partition, device=device)
        if self.vocab_size < 1:
            raise UnusableConfigError(f"the config has a vocabulary of {self.vocab_size} tokens; give one at least")
        self.name = partition.name
        self.precision = precision
        self.hidden_size = int(config.get_text_config().hidden_size)
        matrices = [site.param.numel for site in partition.sites[partition.head] if len(site.param.shape) == 2]
        self.head_matrix_numel = sum(matrices)

    def operators(self, block: BlockIndex, num_examples: int, num_tokens: int) -> LayerOperators:
        """See ProfiledFacts."""
        # A new runner each time, because a partition serves the last one only, and dry runs make their own.
        runner = BlockRunner(self.partition, torch.device(self._device), seed=0)
        with unknown_where(block):
            cost = runner.operators(block, num_examples, num_tokens)
        operators = tuple(
            OperatorProfile(
                name=operator.name,
                outputs_nbytes=operator.outputs_nbytes,
                num_flops=operator.num_flops,
                is_saved=operator.is_saved,
                reads=operator.reads,
            )
            for operator in cost.operators
        )
        return LayerOperators(operators=operators, saves_input=cost.saves_input)


def _built(config: Any, precision: Precision) -> Any:
    """Builds the model. Raises UnusableConfigError if transformers can make none of the config."""
    try:
        return build_meta_model(config, precision)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if "Unrecognized configuration class" in str(error):  # followed by the names of all classes that it knows
            kind = getattr(config, "model_type", type(config).__name__)
            raise UnusableConfigError(
                f"transformers has no causal language model of type {kind!r}: models that encode, translate or see "
                "images are not supported"
            ) from error
        raise UnusableConfigError(f"no model can be built from the config: {type(error).__name__}: {error}") from error


def profile_config(
    config: Any, precision: Precision, *, num_examples: int, num_tokens: int, device: str = "cpu"
) -> ModelProfile:
    """Profiles the model of a transformers config; see `Profiler`."""
    return Profiler(config, precision, device=device).profile(num_examples, num_tokens)


class Profiler:
    """Profiles one model for micro-batches of any shape.

    `device`: see `TracedModel`. `for_gpu`: the job will run on a GPU even if `device` is a CPU, so attention outputs
    are counted for a GPU. `head_slices`: the way in which the job's head goes over tokens.
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
        self._facts = TracedModel(config, precision, device=device)

    @property
    def layout(self) -> ModelLayout:
        """The layout of the model's blocks."""
        return self._facts.layout

    def profile(self, num_examples: int, num_tokens: int) -> ModelProfile:
        """Returns the profile for micro-batches of `num_examples` x `num_tokens` tokens."""
        return profile_of(self._facts, num_examples, num_tokens, for_gpu=self._for_gpu, head_slices=self._head_slices)
