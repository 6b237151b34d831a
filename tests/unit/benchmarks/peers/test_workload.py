"""The workload's files, and the peer that trains them with plain PyTorch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.contenders import Contender, run_contender
from benchmarks.peers.workload import BATCHES_FILE, DATASET_DIR, MODEL_DIR, ModelShape, Workload, read_workload
from windlass.engine.data.dataset import PreparedDataset

WORKLOAD = Workload(
    shape=ModelShape(hidden=64, num_layers=2, vocab=96, intermediate=160, num_heads=2),
    batch_size=2,
    sequence_length=16,
    num_warmup_steps=1,
    num_timed_steps=2,
    num_threads=1,
    seed=3,
    learning_rate=1e-2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    WORKLOAD.write(folder)
    return folder


@pytest.mark.long
def test_workload_comes_back_as_written(folder: Path) -> None:
    assert read_workload(folder) == WORKLOAD


@pytest.mark.long
def test_batches_are_what_windlass_trains_on(folder: Path) -> None:
    batches = np.load(folder / BATCHES_FILE)
    assert batches.shape == (3, 2, 2, 16)
    dataset = PreparedDataset.open(folder / DATASET_DIR, "train")
    for step, (inputs, targets) in enumerate(batches):
        (batch,) = dataset.batch(step, 2, 1, WORKLOAD.seed)
        assert np.array_equal(batch.input_ids.numpy(), inputs)
        assert np.array_equal(batch.targets.numpy(), targets)
        assert np.array_equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.long
def test_plain_peer_trains_as_a_naive_loop_does(folder: Path) -> None:
    run = run_contender(
        Contender(name="plain", title="plain", module="benchmarks.peers.plain_runner"), WORKLOAD, folder
    )
    assert len(run.step_s) == 2
    assert run.losses == pytest.approx(naive_losses(folder), rel=2e-3)
    assert run.losses[0] != pytest.approx(run.losses[2], rel=2e-3)


def naive_losses(folder: Path) -> list[float]:
    """The losses of textbook AdamW on fp32 masters, with the model rounded to bf16 before each step."""
    model = AutoModelForCausalLM.from_pretrained(folder / MODEL_DIR, dtype=torch.bfloat16)
    assert model.num_parameters() == WORKLOAD.shape.num_params
    masters = [param.detach().float() for param in model.parameters()]
    moments = [(torch.zeros_like(master), torch.zeros_like(master)) for master in masters]
    losses = []
    for step, (inputs, targets) in enumerate(torch.from_numpy(np.load(folder / BATCHES_FILE)), start=1):
        logits = model(input_ids=inputs).logits.float()
        loss = -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        for param, master, (average, square) in zip(model.parameters(), masters, moments, strict=True):
            grad = param.grad.float()
            param.grad = None
            average.lerp_(grad, 1 - WORKLOAD.beta1)
            square.lerp_(grad * grad, 1 - WORKLOAD.beta2)
            decay = WORKLOAD.weight_decay if param.ndim >= 2 else 0.0
            corrected = average / (1 - WORKLOAD.beta1**step)
            scale = (square / (1 - WORKLOAD.beta2**step)).sqrt() + WORKLOAD.epsilon
            master.mul_(1 - WORKLOAD.learning_rate * decay).sub_(WORKLOAD.learning_rate * corrected / scale)
            param.data.copy_(master)
    return losses
