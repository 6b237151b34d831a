"""States in bf16 are rounded stochastically by each element's place in the model, for any cut into chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.actors.offload_models import Gpt, gpt_loss, offloaded, seeded

pytestmark = pytest.mark.usefixtures("one_thread")


def weights_after_steps(directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after three steps of a model in bf16 with states in bf16."""
    directory.mkdir()
    model = seeded(Gpt, torch.bfloat16)
    with offloaded(model, directory, num_ssds=1, state_precision="bf16", **options) as (model, optimizer):
        for step in range(3):
            gpt_loss(model, step).backward()
            optimizer.step()
        return dict(model.state_dict())


def test_offload_of_bf16_states_in_chunks_of_any_size_gives_the_same_bits(tmp_path: Path) -> None:
    found = [weights_after_steps(tmp_path / str(numel), chunk_numel=numel) for numel in (2048, 8192, 65536)]
    for other in found[1:]:
        assert [name for name, weight in found[0].items() if not torch.equal(weight, other[name])] == []


class Equal(nn.Module):
    """Layers, and modules outside of them: all weights are equal, and so are all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.outside = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in ("first", "second")})
        for param in self.parameters():
            nn.init.constant_(param, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([each(x) for each in (*self.layers, *self.outside.values())]).sum()


def test_offload_rounds_every_element_of_model_with_bits_of_its_own(tmp_path: Path) -> None:
    # The first step of Adam equals the learning rate: half the distance to the next bf16 number.
    make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=2**-8, weight_decay=0.0)  # noqa: E731
    options: dict[str, Any] = {"state_precision": "bf16", "make_optimizer": make_optimizer, "num_ssds": 1}
    with offloaded(seeded(Equal, torch.bfloat16), tmp_path, **options) as (model, optimizer):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).backward()
        optimizer.step()
        weights = [weight.flatten().tolist() for weight in model.state_dict().values()]
    assert {number for weight in weights for number in weight} == {1.5, 1.5 - 2**-7}
    windows = [tuple(weight[i : i + 100]) for weight in weights for i in range(len(weight) - 100)]
    assert len(set(windows)) == len(windows) == 5 * (64 * 64 - 100)
