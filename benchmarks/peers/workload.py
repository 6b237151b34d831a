"""The workload that every contender trains: one model folder, one list of batches, one set of hyperparameters.

The parent process imports no torch: `prepare` runs in a child (`python -m benchmarks.peers.workload FOLDER`).
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Config

WORKLOAD_FILE = "workload.json"
MODEL_DIR = "model"
DATASET_DIR = "dataset"
BATCHES_FILE = "batches.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen2-shaped model with random weights."""

    hidden: int
    num_layers: int
    vocab: int
    intermediate: int
    num_heads: int
    num_key_value_heads: int | None = None  # None: as many as heads
    is_tied: bool = False  # the head reads the embedding's weights

    @property
    def num_layer_params(self) -> int:
        """The number of parameters of a layer."""
        of_keys = self.hidden // self.num_heads * (self.num_key_value_heads or self.num_heads)
        # Query and output, keys and values; query, key and value have biases.
        attention = 2 * self.hidden * (self.hidden + of_keys) + self.hidden + 2 * of_keys
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def num_params(self) -> int:
        """The number of parameters of the model. Tied ones count once."""
        num_embeddings = 1 if self.is_tied else 2
        return self.num_layers * self.num_layer_params + num_embeddings * self.vocab * self.hidden + self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training run, equal for windlass and its peers: bf16, every layer recomputed, AdamW, no clipping."""

    shape: ModelShape
    batch_size: int
    sequence_length: int
    num_warmup_steps: int  # trained, but not timed
    num_timed_steps: int
    num_threads: int
    seed: int
    num_microbatches: int = 1  # number of parts in which a peer computes the batch
    learning_rate: float = 1e-4
    weight_decay: float = 0.1  # not on norms and biases
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8

    @property
    def num_steps(self) -> int:
        """The number of steps of a run."""
        return self.num_warmup_steps + self.num_timed_steps

    def write(self, folder: Path) -> None:
        """Writes the workload, the model's initial weights and the batches to a folder.

        Loads no torch in this process.
        """
        self._describe(folder)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.workload", str(folder)]
        subprocess.run(command, check=True, stderr=subprocess.PIPE)

    def write_here(self, folder: Path) -> None:
        """Writes the same in this process."""
        self._describe(folder)
        prepare(folder)

    def _describe(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WORKLOAD_FILE).write_text(json.dumps(asdict(self)))


def read_workload(folder: Path) -> Workload:
    """Reads the workload of a folder."""
    fields = json.loads((folder / WORKLOAD_FILE).read_text())
    return Workload(**{**fields, "shape": ModelShape(**fields["shape"])})


def prepare(folder: Path) -> None:
    """Writes initial weights (bf16) and batches (random token ids) to the folder, both from the seed."""
    workload = read_workload(folder)
    _write_model(workload, folder / MODEL_DIR)
    _write_batches(workload, folder)


def model_config(shape: ModelShape, sequence_length: int) -> "Qwen2Config":
    """Returns the shape as a transformers config."""
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_layers,
        vocab_size=shape.vocab,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads or shape.num_heads,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen2ForCausalLM"],
    )


def _write_model(workload: Workload, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    shape = workload.shape
    config = model_config(shape, workload.sequence_length)
    torch.manual_seed(workload.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if model.num_parameters() != shape.num_params:
        raise RuntimeError(f"the model has {model.num_parameters()} parameters where {shape.num_params} were computed")
    model.save_pretrained(folder)


def _write_batches(workload: Workload, folder: Path) -> None:
    """Writes the tokens as a prepared dataset, and as an array in the order in which windlass reads them."""
    import numpy as np

    from windlass.engine.data import PreparedDataset
    from windlass.engine.data.examples import FORMAT_VERSION
    from windlass.engine.data.tokenize import SplitWriter

    dataset_dir = folder / DATASET_DIR
    dataset_dir.mkdir(exist_ok=True)
    generator = np.random.default_rng(workload.seed)
    with SplitWriter(dataset_dir, "train", workload.sequence_length) as writer:
        for _ in range(workload.num_steps * workload.batch_size):
            tokens = generator.integers(0, workload.shape.vocab, workload.sequence_length + 1, dtype=np.int32)
            writer.append(tokens, np.ones(len(tokens), dtype=np.bool_))
        split = {name: getattr(writer, name) for name in ("num_examples", "num_tokens", "num_targets")}
    meta = {"version": FORMAT_VERSION, "sequence_length": workload.sequence_length, "splits": {"train": split}}
    (dataset_dir / "meta.json").write_text(json.dumps(meta))
    dataset = PreparedDataset.open(dataset_dir, "train")
    batches = []
    for step in range(workload.num_steps):
        (batch,) = dataset.batch(step, workload.batch_size, 1, workload.seed)
        batches.append(np.stack([batch.input_ids.numpy(), batch.targets.numpy()]))
    np.save(folder / BATCHES_FILE, np.stack(batches))  # (steps, inputs and targets, batch, sequence)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
