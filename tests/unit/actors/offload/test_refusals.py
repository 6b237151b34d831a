"""Models and optimizers that cannot be trained exactly are refused by name, and a refusal changes nothing."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import windlass
from tests.support.actors.offload_models import Gpt, adamw, gpt_loss, offloaded, seeded
from windlass.engine.memory_plan.plan import PlanError
from windlass.storage.ssd.volume import VOLUME_FILE

pytestmark = pytest.mark.usefixtures("one_thread")


class Chain(nn.Module):
    """Layers in a list, each called on the output of the previous one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def two_lists() -> nn.Module:
    model = Chain(linear())
    model.others = nn.ModuleList([linear()])
    return model


def shared_between_layers() -> nn.Module:
    model = Chain(linear(), linear())
    model.layers[1].weight = model.layers[0].weight
    return model


def tied_to_the_outside() -> nn.Module:
    model = Chain(linear())
    model.head = linear()
    model.head.weight = model.layers[0].weight
    return model


def compiled_layer() -> nn.Module:
    model = Chain(linear(), linear())
    model.layers[1] = torch.compile(model.layers[1], backend="eager")  # type: ignore[assignment]
    return model


def compiled_in_place() -> nn.Module:
    model = Chain(linear())
    model.layers[0].compile(backend="eager")
    return model


def with_checkpointing() -> nn.Module:
    model = Chain(linear())
    model.gradient_checkpointing = True  # type: ignore[assignment]
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Chain(linear())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (linear, "holds no ModuleList"),
        (two_lists, r"several ModuleLists: layers \(72 parameters\), others"),
        (shared_between_layers, r"layers.1.weight and layers.0.weight are one parameter"),
        (tied_to_the_outside, "head.weight and layers.0.weight are one parameter"),
        (compiled_layer, "layers.1 is compiled by torch.compile"),
        (compiled_in_place, "layers.0 is compiled by torch.compile"),
        (with_checkpointing, "gradient checkpointing is on"),
        (on_meta, "layers.0.weight is on the meta device"),
        (lambda: Chain(linear(), linear().bfloat16()), "torch.bfloat16, torch.float32"),
        (lambda: Chain(linear().half(), linear()), "torch.float16, torch.float32"),
        (lambda: Chain(linear().double()), "torch.float64"),
    ],
)
def test_models_that_cannot_be_offloaded(make: Callable[[], nn.Module], message: str, tmp_path: Path) -> None:
    model = make()
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(windlass.CannotOffloadError, match=message):
        windlass.offload(model, torch.optim.AdamW(model.parameters()), ssd_dirs=[tmp_path])
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert not (tmp_path / VOLUME_FILE).exists()


def begun(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    gpt_loss(model, 0).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.SGD(model.parameters()), "the optimizer is SGD"),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), "amsgrad"),
        (lambda model: torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(1))]), "not the model's"),
        (begun, "made steps already"),
    ],
)
def test_optimizers_that_cannot_be_offloaded(make: Callable[[nn.Module], Any], message: str, tmp_path: Path) -> None:
    model = Gpt()
    with pytest.raises(windlass.CannotOffloadError, match=message):
        windlass.offload(model, make(model), ssd_dirs=[tmp_path])


# --- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_offload_in_process_of_launcher_with_two_ranks_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Gpt()
    monkeypatch.setenv(name, "2")
    with pytest.raises(windlass.CannotOffloadError, match=rf"one of 2 ranks \({name}\).*without torchrun"):
        windlass.offload(model, adamw(model), ssd_dirs=[tmp_path])
    assert not any(param.is_meta for param in model.parameters())


@pytest.mark.parametrize(("world_size", "is_refused"), [(1, False), (2, True)])
def test_offload_with_initialised_distributed_is_refused_above_one_rank(
    world_size: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    if is_refused:
        with pytest.raises(windlass.CannotOffloadError, match=r"one of 2 ranks \(torch.distributed\)"):
            windlass.offload(Gpt(), adamw(Gpt()), ssd_dirs=[tmp_path])
    else:
        with offloaded(seeded(Gpt), tmp_path) as (_, optimizer):
            assert optimizer.statistics.num_host_layers == 0


def test_the_user_names_the_layers(tmp_path: Path) -> None:
    options = {"make_optimizer": lambda model: torch.optim.AdamW(model.parameters())}
    with offloaded(two_lists(), tmp_path, layers="others", **options) as (model, optimizer):
        assert not model.layers[0].weight.is_meta  # type: ignore[index, union-attr]
        assert model.others[0].weight.is_meta  # type: ignore[index, union-attr]
    with offloaded(two_lists(), tmp_path, layers=["layers", "others"], **options) as (model, _):
        assert all(param.is_meta for param in model.parameters())
    model = two_lists()
    with pytest.raises(windlass.CannotOffloadError, match="'nowhere'"):
        windlass.offload(model, adamw(model), ssd_dirs=[tmp_path], layers="nowhere")
    del optimizer


def test_a_budget_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="set host_memory_gib"), offloaded(seeded(Gpt), tmp_path, host_memory_gib=1e-4):
        pass
    with offloaded(seeded(Gpt), tmp_path):  # nothing was allocated
        pass


# --- layers that give another result when computed again ------------------------------------------------------------


class InPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


class Closure(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * OUTER


OUTER = torch.ones(8, requires_grad=True)


class Mutating(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return super().forward(x)


class Clamping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


def mutating() -> nn.Module:
    layer = Mutating(8, 8)
    layer.register_buffer("calls", torch.zeros(()))
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InPlace(8, 8), "layers.1 changes an argument in place"),
        (mutating, "layers.1 changes a buffer in place"),
        (lambda: Clamping(8, 8), "layers.1 changes its own parameters in place"),
        (lambda: Closure(8, 8), "layers.1 uses a tensor of shape"),
    ],
)
def test_layers_that_cannot_be_computed_again(make: Callable[[], nn.Module], message: str, tmp_path: Path) -> None:
    with (
        offloaded(Chain(linear(), make()), tmp_path) as (model, _),
        pytest.raises(windlass.CannotOffloadError, match=message),
    ):
        model(torch.randn(2, 8)).sum().backward()


def test_a_key_value_cache(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    with offloaded(GPT2LMHeadModel(config).train(), tmp_path) as (model, _):
        with pytest.raises(windlass.CannotOffloadError, match="use_cache"):
            gpt_loss(model, 0)
        with torch.no_grad():  # no layer is computed again there
            model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3, do_sample=False)  # type: ignore[operator]


def test_read_of_offloaded_parameter_raises(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, _):
        weight = model.layers[1].out.weight  # type: ignore[index, union-attr]
        assert weight.shape == (64, 64)
        assert weight.dtype is torch.float32
        for use in (lambda: weight.sum(), lambda: weight + 1, lambda: weight.cpu(), lambda: weight.data_ptr()):
            with pytest.raises(windlass.ParamsAwayError, match=r"layers\.1\.out\.weight"):
                use()
        with pytest.raises(windlass.ParamsAwayError):
            model.to(torch.bfloat16)


# --- calls in another order ----------------------------------------------------------------------------------------


def test_a_second_backward_that_was_not_announced(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, _):
        gpt_loss(model, 0).backward()
        with pytest.raises(windlass.OffloadMisuseError, match="backwards_per_step"):
            gpt_loss(model, 1)
    with offloaded(seeded(Gpt), tmp_path) as (model, _):
        loss = gpt_loss(model, 0)
        loss.backward(retain_graph=True)
        with pytest.raises(windlass.OffloadMisuseError, match="backwards_per_step"):
            loss.backward()


def test_a_backward_from_before_the_step(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        old = gpt_loss(model, 0)
        gpt_loss(model, 1).backward()
        optimizer.step()
        with pytest.raises(windlass.OffloadMisuseError, match="before the last step"):
            old.backward()


def test_changes_between_backward_and_step(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        gpt_loss(model, 0).backward()
        with pytest.raises(windlass.OffloadMisuseError, match="zero_grad"):
            optimizer.zero_grad()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(windlass.OffloadMisuseError, match="learning rate"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(windlass.OffloadMisuseError, match="clip_norm"):
            optimizer.step()


def test_a_change_of_mode_before_the_backward(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, _):
        loss = gpt_loss(model, 0)
        model.eval()
        with pytest.raises(windlass.OffloadMisuseError, match=r"train\(\) and eval\(\)"):
            loss.backward()


def test_use_after_close(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # some are left by tests of hanging
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        pass
    for use in (lambda: gpt_loss(model, 0), optimizer.step, optimizer.zero_grad, model.state_dict):
        with pytest.raises(windlass.OffloadClosedError):
            use()
    begun = set(threading.enumerate()) - before
    assert not [thread.name for thread in begun if thread.name.startswith(("_run", "ssd"))]


def test_a_directory_that_cannot_be_made_is_named_and_nothing_changes(tmp_path: Path) -> None:
    model, file = seeded(Gpt), tmp_path / "file"
    file.touch()
    for directory, reason in ((file, "File exists"), (file / "below", "Not a directory")):
        with pytest.raises(windlass.CannotOffloadError, match=f"ssd_dirs names {directory}, .*: {reason}"):
            windlass.offload(model, adamw(model), ssd_dirs=[directory], kernel="fused", device="cpu")
    assert gpt_loss(model, 0).item() > 0


def test_new_params_and_new_weights_are_refused(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        for use in (
            lambda: optimizer.add_param_group({"params": []}),
            lambda: model.load_state_dict(model.state_dict()),
        ):
            with pytest.raises(windlass.OffloadMisuseError):
                use()


def test_states_between_backward_and_step_are_refused(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        state_dict = optimizer.state_dict()
        gpt_loss(model, 0).backward()
        for use in (
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(state_dict),
            lambda: optimizer.save(tmp_path / "saved"),
        ):
            with pytest.raises(windlass.OffloadMisuseError, match="between the backward and the step"):
                use()
        assert not (tmp_path / "saved").exists()


def test_a_damaged_disk_is_told(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path, num_ssds=1) as (model, optimizer):
        gpt_loss(model, 0).backward()
        optimizer.step()
        model.state_dict()
        volume = tmp_path / "ssd0" / VOLUME_FILE
        with volume.open("r+b") as file:
            nbytes = volume.stat().st_size
            file.seek(nbytes // 4)
            file.write(b"\xff" * (nbytes - nbytes // 4))

        def go_on() -> None:
            for step in range(3):
                gpt_loss(model, step).backward()
                optimizer.step()

        with pytest.raises(windlass.OffloadFailedError, match="SSD"):
            go_on()
