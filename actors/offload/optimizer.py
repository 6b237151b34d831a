"""The optimizer of an offloaded model, for PyTorch training loops and learning rate schedulers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.actors.offload.checkpoint import load_folder, read_settings, save_folder
from windlass.actors.offload.config import Hyper, OffloadStatistics
from windlass.actors.offload.engine import OffloadEngine
from windlass.actors.offload.errors import CannotOffloadError, OffloadMisuseError
from windlass.actors.offload.layers import OffloadedBlock, OffloadedParameter, WrappedParam
from windlass.engine.optimizer import MOMENTS, AdamSettings, SavedStates
from windlass.storage.ids import StateKind

# The key of the loss scale in state dicts. Torch's optimizers ignore it.
_LOSS_SCALING = "loss_scaling"


class OffloadedOptimizer(torch.optim.Optimizer):
    """AdamW or Adam for an offloaded model.

    It has the `param_groups` of the original optimizer, whose settings may change between steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: OffloadEngine) -> None:
        """`optimizer` must have passed `require_adam` and have the layers' stand-ins among its parameters."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._engine = engine
        self.grad_norm: float | None = None  # of the last step, before clipping; None without clipping and fp16

    @property
    def statistics(self) -> OffloadStatistics:
        """The traffic and the memory so far."""
        return self._engine.statistics

    @property
    def loss_scale(self) -> float:
        """The present loss scale of an fp16 model; 1 for others. It is halved when a step is skipped."""
        return self._engine.trainer.next_loss_scale

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Is read by `torch.amp.GradScaler.step`, whose scaling does not reach the layers' gradients."""
        raise OffloadMisuseError(
            "torch.amp.GradScaler cannot unscale the gradients of offloaded layers; write "
            "`optimizer.scale(loss).backward()` and `optimizer.step()`, which do the same"
        )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to call `backward` on: of an fp16 model multiplied by `loss_scale`, of others unchanged."""
        return self._engine.scale(loss)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient, and discards the gradients. Layers update in the background.

        In an fp16 model, a step whose gradients are not all finite is skipped.

        Raises:
            OffloadMisuseError: the result would differ from plain PyTorch's.
            OffloadFailedError: a disk or a thread failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        outside = {
            param: hyper_of_group(group)
            for group in self.param_groups
            for param in group["params"]
            if not isinstance(param, OffloadedParameter)
        }
        with torch.no_grad():
            self.grad_norm = self._engine.step(outside)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards gradients. After `step` it has no effect. Raises OffloadMisuseError if updates have begun."""
        self._engine.zero_grad()

    def close(self) -> None:
        """Releases memory and SSD space. The layers' parameters are lost: save `model.state_dict()` first."""
        self._engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in torch's layout, as new tensors in host memory, which must have room for all of it.

        It has `step`, `exp_avg` and `exp_avg_sq` of each parameter, and `master` where an fp32 master is kept beside
        the parameter. `save` does not need that memory.

        Raises:
            OffloadMisuseError: updates have begun, and the step has not.
        """
        state_dict: dict[str, Any] = super().state_dict()
        state_dict |= self._loss_scaling()
        num_updates, states = self._engine.num_updates, self._copy_states()
        for name, index, param in self._indices():
            if name not in states:
                continue
            state = state_dict["state"][index] = {"step": torch.tensor(float(num_updates[name]))}
            for kind, values in states[name].items():
                if kind in MOMENTS or (kind is StateKind.MASTER and param.dtype is not torch.float32):
                    state[str(kind)] = values.view(param.shape)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the state by one of `state_dict`, or of torch.optim.AdamW and Adam.

        A `master` also replaces the parameter. Without it the master keeps its value.

        Raises:
            CannotOffloadError: the state has options that cannot be offloaded.
            ValueError: the state is that of other parameters.
            OffloadMisuseError: updates have begun, and the step has not.
        """
        num_updates: dict[str, int] = {}
        states: dict[str, dict[StateKind, torch.Tensor]] = {}
        known = dict(zip(_saved_indices(state_dict), self._indices(), strict=False))
        for index, saved in state_dict["state"].items():
            if index not in known:
                raise ValueError(f"the state has parameter {index}, which no group of it has")
            name, _, param = known[index]
            num_updates[name] = int(saved["step"])
            kinds = [kind for kind in (StateKind.MASTER, *MOMENTS) if kind in saved]
            for kind in kinds:
                if saved[kind].shape != param.shape:
                    raise ValueError(f"{kind} of {name} has shape {tuple(saved[kind].shape)}, not {tuple(param.shape)}")
            states[name] = {kind: saved[kind].reshape(-1) for kind in kinds}
        self._load_groups(state_dict)

        def part_of(_: OffloadedBlock, param: WrappedParam, first: int, count: int) -> SavedStates | None:
            found = states.get(param.name)
            return None if found is None else {kind: state[first : first + count] for kind, state in found.items()}

        self._engine.load_states(num_updates, part_of, states)

    def save(self, folder: str | Path) -> None:
        """Writes the states, the weights of all updated parameters and the settings to a new folder, layer by layer.

        No state is held in memory. The folder appears when it is complete.

        Raises:
            FileExistsError: the folder exists.
            OffloadMisuseError: updates have begun, and the step has not.
        """
        save_folder(
            Path(folder), self._engine, {"param_groups": super().state_dict()["param_groups"], **self._loss_scaling()}
        )

    def load(self, folder: str | Path) -> None:
        """Replaces states, weights and settings by those that `save` wrote, layer by layer.

        The model may have been made with any weights.

        Raises:
            ValueError: the folder is that of another model, or of other formats.
            OffloadMisuseError: updates have begun, and the step has not.
        """
        settings = read_settings(Path(folder))
        num_updates = settings.pop("num_updates")
        load_folder(Path(folder), self._engine, num_updates, lambda: self._load_groups(settings))

    def _loss_scaling(self) -> dict[str, Any]:
        trainer = self._engine.trainer
        return {_LOSS_SCALING: trainer.to_json()} if trainer.scales_loss else {}

    def _copy_states(self) -> dict[str, dict[StateKind, torch.Tensor]]:
        """Returns copies of all states in host memory, flat, by name and kind."""
        copies: dict[str, dict[StateKind, torch.Tensor]] = {}

        def put(param: WrappedParam, first: int, states: SavedStates) -> None:
            for kind, state in states.items():
                whole = copies.setdefault(param.name, {})
                if kind not in whole:
                    whole[kind] = torch.empty(param.numel, dtype=state.dtype)
                whole[kind][first : first + state.numel()] = state

        for block in self._engine.blocks:
            self._engine.read_states(block, put)
        for name, states in self._engine.outside_states().items():
            copies[name] = {kind: torch.empty_like(state, device="cpu").copy_(state) for kind, state in states.items()}
        return copies

    def _indices(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yields the name, the index in state dicts, and the tensor of each parameter."""
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            yield self._engine.name_of(param), index, param

    def _load_groups(self, state_dict: dict[str, Any]) -> None:
        """Replaces the settings of the groups, in the dicts that the engine reads, and the loss scale."""
        for group in state_dict["param_groups"]:
            require_options(group)
        groups = self.param_groups
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups
        if self._engine.trainer.scales_loss and _LOSS_SCALING in state_dict:
            self._engine.trainer.restore(state_dict[_LOSS_SCALING])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; only torch's constructor may call it. Raises OffloadMisuseError afterwards."""
        if hasattr(self, "_engine"):
            raise OffloadMisuseError("parameters cannot be added to an offloaded optimizer; offload again with all")
        super().add_param_group(param_group)


def hyper_of_group(group: dict[str, Any]) -> Hyper:
    """Returns the present update settings of a parameter group."""
    beta1, beta2 = group["betas"]
    settings = AdamSettings(
        beta1=float(beta1),
        beta2=float(beta2),
        epsilon=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
    )
    return Hyper(settings, float(group["lr"]))


def require_adam(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Checks that the update kernels support the optimizer.

    Raises:
        CannotOffloadError: it is not AdamW or Adam, it has unsupported options, it has made steps, or it belongs to
            another model.
    """
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise CannotOffloadError(
            f"the optimizer is {type(optimizer).__name__}; only torch.optim.AdamW and torch.optim.Adam can be offloaded"
        )
    if optimizer.state:
        raise CannotOffloadError("the optimizer has made steps already; offload before the first one")
    known = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        require_options(group)
        if any(id(param) not in known for param in group["params"]):
            raise CannotOffloadError("the optimizer holds parameters that are not the model's; offload them together")


def require_options(group: dict[str, Any]) -> None:
    """Raises CannotOffloadError if a parameter group has options that the update kernels do not support."""
    for option in ("amsgrad", "maximize", "differentiable"):
        if group.get(option):
            raise CannotOffloadError(f"the optimizer has {option} set, which cannot be offloaded")


def _saved_indices(state_dict: dict[str, Any]) -> Iterator[int]:
    """Yields the indices of a state dict's parameters, in the order of its groups."""
    for group in state_dict["param_groups"]:
        yield from group["params"]
