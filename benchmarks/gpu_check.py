"""Does windlass compute on this GPU what plain PyTorch computes, and how fast? `make gpu-check`

One process, all actors as threads; needs torch and transformers, no Ray and no web service. Prints and writes a dated
report. Where there is no GPU it says so and ends well.
"""

import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config

from benchmarks.machine import num_cores
from benchmarks.report import Report
from tests.training import has_direct_io, losses_of, make_partition, make_spec, metrics_of, train_plainly
from windlass.actors.job_spec import Initialization, JobSpec
from windlass.actors.local import run_local
from windlass.engine.data import FORMAT_VERSION, NO_TARGET
from windlass.planner.plan import Placement
from windlass.storage.ids import Kernel, Precision

REPORTS = Path(__file__).parent / "reports"
# The largest relative difference of any of 30 losses.
LIMITS = {Precision.FP32: 1e-5, Precision.BF16: 1e-3, Precision.FP16: 1e-3}
# Where model states rest.
PLACES = ("SSD", "host", "device")
_NUM_STEPS = 6
_NUM_WARMUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen2.5 shape."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    intermediate: int
    batch_size: int = 8
    sequence_length: int = 1024


SHAPES = (
    Shape(name="0.5B", hidden=896, num_layers=24, num_heads=14, intermediate=4864),
    Shape(name="1.5B", hidden=1536, num_layers=28, num_heads=12, intermediate=8960),
)


def main() -> int:
    """Exit code 1 if a loss is off, else 0."""
    if not torch.cuda.is_available():
        print("gpu-check skipped: this machine has no CUDA device that torch can use")
        return 0
    # TF32 would round fp32 products; the comparison is with exact ones.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    configuration = {"device": torch.cuda.get_device_name(0), "CUDA": torch.version.cuda}
    with tempfile.TemporaryDirectory(prefix=".gpu-check-", dir=".") as folder:
        root = Path(folder).absolute()
        report = Report("GPU check", root, configuration)
        worst = parity(report, root)
        speeds = speed(report, root)
    report.finish({"loss_difference_max": worst, "tokens_per_s": speeds})
    REPORTS.mkdir(exist_ok=True)
    path = REPORTS / f"{report.lines[2][:10]}-gpu_check.md"
    path.write_text("\n".join(report.lines) + "\n")
    print(f"written to {path.relative_to(Path.cwd())}")
    return int(any(worst[precision] > LIMITS[Precision(precision)] for precision in worst))


def parity(report: Report, root: Path) -> dict[str, float]:
    """Losses of 30 steps beside plain PyTorch's on the same GPU, released buffers filled with NaN.

    With states on the device the updates run there: torch's fused ones, and those compiled for the GPU where there is
    a compiler.
    """
    rows: list[tuple[str, ...]] = []
    worst: dict[str, float] = {}
    modes = [("SSD", Kernel.FUSED), ("device", Kernel.FUSED), ("device", None)]
    cases = product(LIMITS.items(), (1, 4), (False, True), modes)
    for i, ((precision, limit), num_microbatches, tied, (place, kernel)) in enumerate(cases):
        spec = make_spec(
            root / f"parity-{i}", tied=tied, precision=precision, num_microbatches=num_microbatches, kernel=kernel
        )
        partition = make_partition(spec)
        spec = dataclasses.replace(spec, placement=placement_in(place, len(partition.layout.blocks)))
        outcome = _run(spec, root, poison=True, partition=partition)
        assert outcome["status"] == "succeeded", outcome
        plain = train_plainly(spec, "cuda")
        found = losses_of(spec)
        difference = max(abs(a - b) / b for a, b in zip(found, plain.losses, strict=True))
        worst[str(precision)] = max(worst.get(str(precision), 0.0), difference)
        verdict = "equal" if difference <= limit else "DIFFERS"
        names = (str(precision), str(num_microbatches), str(tied), place, str(kernel or "compiled if possible"))
        rows.append((*names, f"{difference:.1e}", f"{limit:.0e}", verdict))
    columns = ("precision", "micro-batches", "tied", "states on", "kernel", "largest loss difference", "limit", "")
    report.add_table(columns, rows)
    return worst


def speed(report: Report, root: Path) -> dict[str, float]:
    """Tokens per second with model states on the SSD, in host memory, and on the device."""
    rows: list[tuple[str, ...]] = []
    speeds: dict[str, float] = {}
    for shape, place in product(SHAPES, PLACES):
        with tempfile.TemporaryDirectory(prefix="states-", dir=root) as states:
            spec = _speed_spec(shape, root / f"{shape.name}-{place}", Path(states), place)
            torch.cuda.reset_peak_memory_stats()
            try:
                outcome = _run(spec, Path(states), poison=False)
            except RuntimeError as error:
                rows.append((shape.name, place, f"not measured: {error}"[:160], "", ""))
                continue
            if outcome["status"] != "succeeded":
                rows.append((shape.name, place, f"failed: {outcome['error']['message']}"[:160], "", ""))
                continue
            # But for the last, which writes what rests in memory.
            step_s = statistics.median(list(metrics_of(spec, "step_s").values())[_NUM_WARMUP:-1])
            tokens_per_s = shape.batch_size * shape.sequence_length / step_s
            speeds[f"{shape.name} {place}"] = tokens_per_s
            peak = torch.cuda.max_memory_allocated() / 2**30
            rows.append((shape.name, place, f"{tokens_per_s:.0f}", f"{step_s:.2f}", f"{peak:.2f}"))
            shutil.rmtree(spec.job_dir, ignore_errors=True)
    report.add_table(("shape", "model states", "tokens per second", "step, s", "peak GPU memory, GiB"), rows)
    return speeds


def placement_in(place: str, num_blocks: int) -> Placement:
    """All blocks' states in one place."""
    blocks = tuple(range(num_blocks))
    return Placement(host_blocks=blocks if place == "host" else (), device_blocks=blocks if place == "device" else ())


def _run(spec: JobSpec, states: Path, *, poison: bool, partition: Any = None) -> dict[str, Any]:
    return run_local(spec, partition=partition, device="cuda", poison_released=poison, direct=has_direct_io(states))


def _speed_spec(shape: Shape, folder: Path, states: Path, place: str) -> JobSpec:
    """A job of random weights and random tokens; no clipping, one micro-batch."""
    folder.mkdir()
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder / "model")
    _write_tokens(folder / "data", shape, config.vocab_size)
    spec = make_spec(folder / "base", precision=Precision.BF16, clip_norm=None)
    hyper = dataclasses.replace(
        spec.hyperparameters,
        batch_size=shape.batch_size,
        num_microbatches=1,
        sequence_length=shape.sequence_length,
        kernel=None,
    )
    return dataclasses.replace(
        spec,
        model_dir=str(folder / "model"),
        initialization=Initialization.RANDOM,
        dataset_dir=str(folder / "data"),
        num_validation_examples=0,
        ssd_dirs=(str(states / "0"), str(states / "1")),
        hyperparameters=hyper,
        total_steps=_NUM_STEPS,
        evaluate_every=None,
        optimizer_threads=max(1, num_cores() - 2),
        kernel_dir=str(folder / "kernels"),
        deadline_s=120.0,
        placement=placement_in(place, shape.num_layers + 2),
    )


def _write_tokens(folder: Path, shape: Shape, vocabulary: int) -> None:
    folder.mkdir()
    num_examples, length = shape.batch_size * _NUM_STEPS, shape.sequence_length
    tokens = np.random.default_rng(0).integers(0, vocabulary, (num_examples, length), dtype=np.int32)
    targets = np.roll(tokens, -1, axis=1)
    targets[:, -1] = NO_TARGET
    tokens.tofile(folder / "train.tokens")
    targets.tofile(folder / "train.targets")
    np.arange(0, tokens.size + 1, length, dtype=np.int64).tofile(folder / "train.offsets")
    counts = {
        "num_tokens": tokens.size,
        "num_examples": num_examples,
        "num_targets": int((targets != NO_TARGET).sum()),
    }
    meta = {"version": FORMAT_VERSION, "sequence_length": length, "splits": {"train": counts}}
    (folder / "meta.json").write_text(json.dumps(meta))


if __name__ == "__main__":
    sys.exit(main())
