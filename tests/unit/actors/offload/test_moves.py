"""Movement of bytes: states really leave memory, buffers stay few, and nothing is left behind.

State dicts hold the true weights.
"""

import gc
import multiprocessing
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.offload_models import (
    NUM_LAYERS,
    Gpt,
    PlainAdam,
    adamw,
    assert_same_weights,
    gpt_loss,
    offloaded,
    seeded,
)
from tests.support.late_streams import LateStreams
from tests.support.storage.stores import make_geometry, new_store, open_volume
from tests.support.training import has_direct_io
from windlass.engine.device import device as device_module
from windlass.engine.device.streams import StartThreads
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import JobId
from windlass.storage.memory.arena import Arena
from windlass.storage.ssd.volume import Volume
from windlass.storage.store.tensor_store import TensorStore

pytestmark = pytest.mark.usefixtures("one_thread")


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    gpt_loss(model, step).backward()
    optimizer.step()


def num_layer_params(model: torch.nn.Module) -> int:
    return sum(param.numel() for name, param in model.named_parameters() if "layers" in name)


def test_states_move_every_step(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        numel = num_layer_params(model)
        before = optimizer.statistics
        assert before.ssd_written_nbytes >= 12 * numel  # master and two moments
        for step in range(3):
            one_step(model, optimizer, step)
        model.state_dict()  # waits for the updates
        after = optimizer.statistics
        assert after.ssd_written_nbytes - before.ssd_written_nbytes >= 3 * 12 * numel
        # Read for updates, forward and backward passes; a layer that is still in a buffer is not fetched again.
        assert after.ssd_read_nbytes - before.ssd_read_nbytes >= 3 * (12 + 4) * numel
        num_fetched = after.num_layers_fetched - before.num_layers_fetched
        assert 3 * NUM_LAYERS < num_fetched <= 3 * 2 * NUM_LAYERS + 3


def test_states_in_memory_do_not_move(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path, host_memory_gib=1.0) as (model, optimizer):
        assert optimizer.statistics.num_host_layers == NUM_LAYERS
        one_step(model, optimizer)
        model.state_dict()
        assert optimizer.statistics.ssd_written_nbytes == optimizer.statistics.ssd_read_nbytes == 0


def test_original_weights_are_freed(tmp_path: Path) -> None:
    model = seeded(Gpt)
    originals = list(model.layers.parameters())  # type: ignore[union-attr, operator]
    storages = [param.untyped_storage() for param in originals]
    with offloaded(model, tmp_path):
        assert all(param.numel() == 0 for param in originals)
        references = [weakref.ref(storage) for storage in storages]
        del storages
        gc.collect()
        assert not any(reference() for reference in references)
        assert all(param.is_meta for param in model.layers.parameters())  # type: ignore[union-attr, operator]


def test_layers_are_fetched_ahead(tmp_path: Path) -> None:
    """From the second step on the order is known: when a layer is called, the next ones are in flight."""
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        one_step(model, optimizer)
        feed = optimizer._engine._feed
        ahead: list[set[int]] = []
        for layer in model.layers:  # type: ignore[union-attr]
            layer.register_forward_pre_hook(lambda *_: ahead.append(set(feed._entries)))  # type: ignore[operator]
        with torch.no_grad():
            gpt_loss(model, 1)
        assert all({i} <= ahead[i] for i in range(1, NUM_LAYERS))


def test_weights_held_beyond_a_call_are_nan(tmp_path: Path) -> None:
    held: list[torch.Tensor] = []
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        for layer in model.layers:  # type: ignore[union-attr]
            layer.out.register_forward_hook(lambda module, *_: held.append(module.weight.detach()))  # type: ignore[union-attr, operator]
        one_step(model, optimizer)
        assert len(held) == 2 * NUM_LAYERS  # forward, and again in backward
        assert any(bool(weight.isnan().all()) for weight in held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_dict_before_and_between_steps(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = seeded(Gpt, dtype)
    optimizer_of_plain = PlainAdam(adamw(plain), None)
    with offloaded(seeded(Gpt, dtype), tmp_path) as (model, optimizer):
        assert_same_weights(model, plain)
        for step in range(2):
            one_step(model, optimizer, step)
            gpt_loss(plain, step).backward()
            optimizer_of_plain.step()
            optimizer_of_plain.zero_grad()
            assert_same_weights(model, plain)
        copy = Gpt().to(dtype)
        copy.load_state_dict(model.state_dict())
        assert torch.equal(gpt_loss(copy, 5), gpt_loss(model, 5))


def test_save_pretrained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, use_cache=False)
    with offloaded(seeded(lambda: GPT2LMHeadModel(config).eval()), tmp_path) as (model, optimizer):
        one_step(model, optimizer)
        model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
        expected = gpt_loss(model, 3)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", use_cache=False)
        assert torch.equal(gpt_loss(saved, 3), expected)


class LateEvent:
    """A point of a GPU's stream that is reached only when a stream or the host waits for it."""

    has_come = False

    def is_over(self) -> bool:
        return self.has_come

    def wait(self) -> None:
        self.has_come = True

    def time_s(self) -> float:
        return 0.0


def test_offload_on_a_gpu_waits_before_copies_of_what_the_compute_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient is complete before it is copied out, and a buffer is no longer read when params are copied in."""
    with offloaded(seeded(Gpt), tmp_path, num_ssds=1, clip_norm=1.0) as (model, optimizer):
        engine = optimizer._engine
        device, feed, updates = engine._device, engine._feed, engine._updates
        monkeypatch.setattr(device, "record_current", LateEvent)
        buffers = {flat.data_ptr(): index for index, flat in enumerate(feed._flats)}
        computed: dict[int, LateEvent] = {}  # for each gradient in flight
        outward: list[bool] = []
        inward: list[bool] = []
        put, copy_out, chunk_arrived = updates._to_offload.put, updates._copy_out, feed.chunk_arrived

        def noted_put(grad: Any) -> None:
            if grad is not None:
                computed[grad.flat.data_ptr()] = grad.computed
            put(grad)

        def noted_copy_out(block: Any, flat: torch.Tensor) -> None:
            outward.append(computed[flat.data_ptr()].is_over())
            copy_out(block, flat)

        def noted_arrival(entry: Any, *rest: Any) -> None:
            """Is called before a chunk's copy is queued."""
            used = feed._used[buffers[entry.buffer.untyped_storage().data_ptr()]]
            inward.append(used is None or used.is_over())
            chunk_arrived(entry, *rest)

        monkeypatch.setattr(updates._to_offload, "put", noted_put)
        monkeypatch.setattr(updates, "_copy_out", noted_copy_out)
        monkeypatch.setattr(feed, "chunk_arrived", noted_arrival)
        for step in range(2):
            one_step(model, optimizer, step)
        model.state_dict()
        monkeypatch.undo()
    assert len(outward) == 2 * NUM_LAYERS
    assert len(inward) > 2 * NUM_LAYERS
    assert all(outward)
    assert all(inward)


def left_behind(directory: Path) -> list[str]:
    found = [path.name for path in Path("/dev/shm").glob(f"windlass-offload-{os.getpid()}-*")]
    for ssd_dir in directory.glob("ssd*"):
        found += [path.name for path in ssd_dir.glob("*.lock")]
        volume = Volume.open(ssd_dir, direct=has_direct_io(ssd_dir))
        found += volume.allocations()
        volume.close()
    return found


def test_close_leaves_nothing(tmp_path: Path) -> None:
    with offloaded(seeded(Gpt), tmp_path) as (model, optimizer):
        gpt_loss(model, 0).backward()
        optimizer.step()  # updates are in progress
        assert left_behind(tmp_path)
    assert left_behind(tmp_path) == []
    optimizer.close()  # a second time


def _die_offloaded(directory: Path) -> None:
    with offloaded(seeded(Gpt), directory) as (model, optimizer):
        one_step(model, optimizer)
        os.kill(os.getpid(), signal.SIGKILL)


def test_offload_where_leftovers_cannot_be_deleted_raises_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are left in place only if another process holds their lock."""
    (tmp_path / "ssd0").mkdir()
    volume = open_volume(tmp_path / "ssd0")
    new_store(volume, make_geometry(JobId("offload-1-0")))
    volume.close()

    def fail(volume: Volume, job: JobId) -> None:
        raise BlockingIOError(f"{job} cannot be deleted now")

    monkeypatch.setattr(TensorStore, "delete", fail)
    optimizer = offloaded(seeded(Gpt), tmp_path, num_ssds=1)
    with pytest.raises(BlockingIOError, match="offload-1-0 cannot be deleted now"), optimizer:
        pass


@pytest.mark.long
def test_states_of_killed_process_are_deleted_by_next_use(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_offloaded, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert left_behind(tmp_path)
    with (
        offloaded(seeded(Gpt), tmp_path) as (_, optimizer),
        offloaded(seeded(Gpt), tmp_path) as (other, other_optimizer),
    ):
        # The second user deleted nothing of the first one, which is alive.
        one_step(other, other_optimizer)
        assert optimizer.statistics.num_host_layers == 0
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("order", [("compute", "h2d", "d2h"), ("d2h", "compute", "h2d"), 1], ids=str)
@pytest.mark.parametrize("host_memory_gib", [None, 1.0], ids=["on SSDs", "in memory"])
def test_offload_on_late_streams_is_same_as_plain_pytorch(
    order: tuple[str, ...] | int, host_memory_gib: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies run as late as possible. What does not wait for them reads NaN, or the next step's values."""

    def open_streams(device: torch.device, token: CancelToken, start_threads: StartThreads) -> LateStreams:
        return LateStreams(start_threads, token=token, order=order)

    monkeypatch.setattr(device_module, "open_streams", open_streams)
    plain = seeded(Gpt)
    plain_optimizer = PlainAdam(adamw(plain), None)
    with offloaded(seeded(Gpt), tmp_path, num_ssds=1, host_memory_gib=host_memory_gib) as (model, optimizer):
        for step in range(3):
            one_step(model, optimizer, step)
            one_step(plain, plain_optimizer, step)  # type: ignore[arg-type]
            plain_optimizer.zero_grad()
        assert_same_weights(model, plain)


def test_memory_is_near_the_device_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    made: list[int | None] = []
    create = Arena.create

    def create_noted(path: Path, nbytes: int, *, node: int | None) -> Arena:
        made.append(node)
        return create(path, nbytes, node=node)

    monkeypatch.setattr("windlass.actors.offload.engine.memory_node", lambda device: asked.append(device) or 0)
    monkeypatch.setattr(Arena, "create", create_noted)
    with offloaded(seeded(Gpt), tmp_path, num_ssds=1) as (model, optimizer):
        one_step(model, optimizer)
    assert (asked, made) == ([torch.device("cpu")], [0])
