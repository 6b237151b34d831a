"""A small job, and helpers that read its results."""

import dataclasses
import errno
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from windlass.actors.job.journal import JournalRecord, read_journal
from windlass.actors.job.spec import JobSpec
from windlass.actors.worker_policy.stages import Stage
from windlass.engine.data.examples import FORMAT_VERSION, NO_TARGET
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.model.partition import Partition, build_meta_model, load_config
from windlass.engine.training_config.training_config import Schedule, TrainingConfig
from windlass.storage.ids import JobId, Kernel, Precision
from windlass.storage.io.engines import DEFAULT_IO
from windlass.storage.ssd.calibration import Calibration
from windlass.storage.ssd.volume import VOLUME_FILE, Volume
from windlass.storage.ssd.volume_format import HEADER_UNITS, UNIT_NBYTES

VOCABULARY = 128
NUM_VALIDATION_EXAMPLES = 7
# Gives five chunks a layer: the last is short and holds parameters with and without weight decay.
CHUNK_NUMEL = 8192
TRAINING = TrainingConfig(
    epochs=6,
    batch_size=4,
    num_microbatches=1,
    sequence_length=48,
    learning_rate=1e-3,
    warmup_steps=3,
    schedule=Schedule.COSINE,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    clip_norm=None,
    precision=Precision.FP32,
    seed=5,
    kernel=Kernel.FUSED,  # needs no compiler, which is slow
    total_steps=30,
    evaluate_every=15,
)


def make_model(directory: Path, *, tied: bool = False, dropout: float = 0.0) -> Path:
    """A folder with a tiny Qwen2 with random weights."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def make_dataset(directory: Path) -> Path:
    """A prepared dataset whose examples differ in length and in how many of their tokens are targets.

    18 training examples: the last batch of an epoch has 2 instead of 4.
    """
    directory.mkdir()
    generator = np.random.default_rng(0)
    splits = {"train": 18, "validation": NUM_VALIDATION_EXAMPLES}
    meta = {name: _write_split(directory, name, count, generator) for name, count in splits.items()}
    facts = {"version": FORMAT_VERSION, "sequence_length": TRAINING.sequence_length, "splits": meta}
    (directory / "meta.json").write_text(json.dumps(facts))
    return directory


def _write_split(directory: Path, name: str, num_examples: int, generator: np.random.Generator) -> dict[str, int]:
    lengths = generator.integers(8, TRAINING.sequence_length + 1, num_examples)
    examples = [generator.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]
    targets = [_targets(example, prompt=int(generator.integers(1, 6))) for example in examples]
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    np.concatenate(examples).tofile(directory / f"{name}.tokens")
    np.concatenate(targets).tofile(directory / f"{name}.targets")
    offsets.tofile(directory / f"{name}.offsets")
    num_targets = sum(int((each != NO_TARGET).sum()) for each in targets)
    return {"num_tokens": int(offsets[-1]), "num_examples": num_examples, "num_targets": num_targets}


def _targets(example: npt.NDArray[np.int32], prompt: int) -> npt.NDArray[np.int32]:
    """The next token of each position, without the first `prompt` positions and the last."""
    targets = np.append(example[1:], NO_TARGET).astype(np.int32)
    targets[:prompt] = NO_TARGET
    return targets


CALIBRATION = Calibration(
    io=DEFAULT_IO,
    read_bytes_per_s=2e9,
    write_bytes_per_s=2e9,
    mixed_bytes_per_s=2e9,
    cpu_s_per_byte=7e-11,
    measured_at="2026-01-01",
)


def make_spec(root: Path, *, tied: bool = False, dropout: float = 0.0, num_ssds: int = 2, **changes: Any) -> JobSpec:
    """A job of 30 steps below `root`, with its model, data and layout.

    `changes`: fields of the spec or of its training config.
    """
    root.mkdir(exist_ok=True)
    model_dir = make_model(root / "model", tied=tied, dropout=dropout)
    dataset_dir = make_dataset(root / "data")
    (root / "job").mkdir()
    names = [field.name for field in dataclasses.fields(TrainingConfig)]
    training = {name: changes.pop(name) for name in names if name in changes}
    spec = JobSpec(
        # A unique name: tests look for leftovers in /dev/shm, where other tests run at the same time.
        job=JobId(f"ftjob-{secrets.token_hex(8)}"),
        model_dir=str(model_dir),
        layout_file=str(root / "layout.json"),
        dataset_dir=str(dataset_dir),
        num_validation_examples=NUM_VALIDATION_EXAMPLES,
        job_dir=str(root / "job"),
        output_dir=str(root / "out"),
        ssd_dirs=tuple(str(root / f"ssd{i}") for i in range(num_ssds)),
        training=dataclasses.replace(TRAINING, **training),
        deadline_s=60.0,
    )
    spec = dataclasses.replace(spec, **changes)
    Path(spec.layout_file).write_text(make_partition(spec).layout.to_json())
    for ssd_dir in spec.ssd_dirs:
        keep_calibration(Path(ssd_dir))
    return spec


def keep_calibration(ssd_dir: Path) -> None:
    """Makes an SSD directory whose speed is known, because measuring takes longer than many tests."""
    ssd_dir.mkdir(parents=True, exist_ok=True)
    volume = Volume.open(ssd_dir, direct=has_direct_io(ssd_dir))
    volume.keep_calibration(CALIBRATION.to_json())
    volume.close()


def boxes_of(spec: JobSpec, stages: tuple[Stage, ...], ranks: tuple[int, ...] = ()) -> list[JobSpec]:
    """The specification of each box: its SSDs, its arena, its part of the placement, and copies of all files.

    No two boxes have a path in common. `ranks`: the GPU workers of each; empty: all have as many as `spec`.
    """
    root, place, boxes = Path(spec.job_dir).parent, spec.placement, []
    for box, stage in enumerate(stages):
        ssd_dirs = tuple(f"{name}-of-box-{box}" for name in spec.ssd_dirs)
        arena_dir = root / f"shm{box}"
        arena_dir.mkdir(exist_ok=True)
        for ssd_dir in map(Path, ssd_dirs):
            if not ssd_dir.exists():
                keep_calibration(ssd_dir)
        own = dataclasses.replace(
            place,
            host_blocks=tuple(filter(stage.has, place.host_blocks)),
            device_blocks=tuple(filter(stage.has, place.device_blocks)),
            streamed_blocks=tuple(filter(stage.has, place.streamed_blocks)),
        )
        here = with_own_files(spec, root / f"box{box}") if box else spec
        boxes.append(
            dataclasses.replace(
                here,
                box=box,
                stages=stages,
                num_ranks=ranks[box] if ranks else here.num_ranks,
                ranks_of_boxes=ranks,
                ssd_dirs=ssd_dirs,
                arena_dir=str(arena_dir),
                placement=own,
            )
        )
    return boxes


def with_own_files(spec: JobSpec, home: Path) -> JobSpec:
    """The specification for a box that has copies of the first one's files in its own home."""
    if not home.exists():
        (home / "job").mkdir(parents=True)
        shutil.copytree(spec.model_dir, home / "model")
        shutil.copytree(spec.dataset_dir, home / "data")
        shutil.copy(spec.layout_file, home / "layout.json")
    return dataclasses.replace(
        spec,
        model_dir=str(home / "model"),
        layout_file=str(home / "layout.json"),
        dataset_dir=str(home / "data"),
        job_dir=str(home / "job"),
        output_dir=str(home / "out"),
    )


def make_partition(spec: JobSpec) -> Partition:
    """The job's model in blocks, cut into chunks of `CHUNK_NUMEL`."""
    return Partition(build_meta_model(load_config(spec.model_dir), spec.training.precision), CHUNK_NUMEL)


def has_direct_io(directory: Path) -> bool:
    """Returns whether the file system supports O_DIRECT; memory-backed ones may not."""
    probe = directory / "direct-io-probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


# --- results of a job -----------------------------------------------------------------------------------------------


def journal_of(spec: JobSpec) -> list[JournalRecord]:
    """All records of the job's journal."""
    return list(read_journal(Path(spec.job_dir) / "journal.jsonl"))


def metrics_of(spec: JobSpec, name: str) -> dict[int, float]:
    """One metric by step; steps that lack it are left out."""
    records = [record for record in journal_of(spec) if record.kind == "metrics" and name in record.data]
    by_step = {record.data["step"]: record.data[name] for record in records}
    assert len(by_step) == len(records), f"a step reported its {name} twice"
    return by_step


def losses_of(spec: JobSpec) -> list[float]:
    """The training losses of steps 1, 2, 3, ..., none missing."""
    losses = metrics_of(spec, "train_loss")
    assert list(losses) == list(range(1, len(losses) + 1))
    return list(losses.values())


def exported_params(spec: JobSpec) -> dict[str, torch.Tensor]:
    """The final model, as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(spec.output_dir, dtype="auto")
    assert model.dtype == TORCH_DTYPE[spec.training.precision]
    return {name: param.detach() for name, param in model.named_parameters()}


def leftovers_of(spec: JobSpec) -> list[str]:
    """Files and allocations that the job has left in shared memory or in its SSD directories."""
    found = [str(path) for path in Path(spec.arena_dir).iterdir() if spec.job in path.name]
    for name in spec.ssd_dirs:
        for path in Path(name).iterdir() if Path(name).exists() else ():
            if path.name != VOLUME_FILE:
                found.append(str(path))
                continue
            volume = Volume.open(name, direct=has_direct_io(Path(name)))
            found += [f"{job} in {path}" for job in volume.allocations()]
            volume.close()
            if path.stat().st_size > HEADER_UNITS * UNIT_NBYTES:
                found.append(f"{path} of {path.stat().st_size} bytes")
    return found
