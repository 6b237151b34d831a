"""The planner's view of a machine: the rate of each resource and the capacity of each tier.

`windlass doctor` measures it. A user can also write it by hand, for a machine that is planned. Rates are those that a
job achieves (large matrix products, long transfers), not those of a data sheet. GB is 10^9 bytes, GiB 2^30.
"""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field

from windlass.planner.hardware.yaml_files import Part

# Range of rates. It is wider than a wrong unit could make a value, and bounded for the solver's arithmetic.
_LEAST, _MOST = 1e-6, 1e15


def _not_too_small(value: float) -> float:
    if value < _LEAST:
        raise ValueError(f"{value!r}: input should be at least {_LEAST:g}")
    return value


Rate = Annotated[float, Field(gt=0, le=_MOST, allow_inf_nan=False), AfterValidator(_not_too_small)]
Count = Annotated[int, Field(ge=1, le=10_000)]


class Gpus(Part):
    """Equal GPUs. `tflops`: 10^12 operations/s of one GPU, in large matrix products in the training precision.

    `fp32_tflops`: the same for jobs in fp32; on a CPU for attention, too. None: as in `tflops`.
    """

    count: Annotated[int, Field(ge=0, le=10_000)]
    memory_gib: Rate
    tflops: Rate
    fp32_tflops: Rate | None = None
    name: str | None = None


class Host(Part):
    """The host of a machine.

    `adam_params_per_s`: rate of all optimizers of a job, gradients to new states in memory.
    """

    memory_gib: Rate
    memory_gb_per_s: Rate
    adam_params_per_s: Rate


class Pcie(Part):
    """The link of one GPU, each direction while the other one is idle. On a CPU: a thread that copies.

    `duplex_gb_per_s`: both directions at once, summed. `uplinks`: the number of links to the host behind which all GPUs
    are, in equal parts, each as fast as the link of one GPU; without it, each GPU has its own.
    """

    h2d_gb_per_s: Rate
    d2h_gb_per_s: Rate
    duplex_gb_per_s: Rate | None = None
    uplinks: Count | None = None


class Ssds(Part):
    """The rates and capacity of one SSD.

    `combined_gb_per_s` limits the reads and writes of all SSDs together. `cpu_s_per_gb`: core-seconds for each GB
    moved; it counts only if the device is the CPU.
    """

    count: Count
    read_gb_per_s: Rate
    write_gb_per_s: Rate
    capacity_gib: Rate
    combined_gb_per_s: Rate | None = None
    cpu_s_per_gb: Rate | None = None


class Hardware(Part):
    """One machine. `network_gb_per_s`: each direction of its network card. Only plans over several boxes use it."""

    gpus: Gpus
    host: Host
    pcie: Pcie
    ssds: Ssds
    network_gb_per_s: Rate | None = None


# Usual ranges. A value outside probably has the wrong unit. It causes only a warning, because machines improve.
_USUAL = {
    "gpus.count": (0, 16),
    "gpus.memory_gib": (1, 1024),
    "gpus.tflops": (0.01, 10_000),
    "gpus.fp32_tflops": (0.01, 10_000),
    "host.memory_gib": (1, 32_768),
    "host.memory_gb_per_s": (1, 10_000),
    "host.adam_params_per_s": (1e7, 1e12),
    "pcie.h2d_gb_per_s": (0.5, 1000),
    "pcie.d2h_gb_per_s": (0.5, 1000),
    "pcie.duplex_gb_per_s": (0.5, 2000),
    "pcie.uplinks": (1, 16),
    "ssds.count": (1, 64),
    "ssds.read_gb_per_s": (0.05, 100),
    "ssds.write_gb_per_s": (0.05, 100),
    "ssds.capacity_gib": (1, 1_000_000),
    "ssds.combined_gb_per_s": (0.05, 2000),
    "ssds.cpu_s_per_gb": (0.001, 10),
    "network_gb_per_s": (0.05, 1000),
}
# Units by key suffix, with other units that a user may have meant, as multiples of the right one.
_UNITS: dict[str, tuple[str, dict[str, float]]] = {
    "gib": ("GiB are 2^30 bytes", {"MiB": 2**-10, "bytes": 2**-30, "TiB": 2**10}),
    "s_per_gb": ("seconds of one core", {"ms/GB": 1e-3, "s/byte": 1e9}),
    "gb_per_s": ("GB are 10^9 bytes, not bits", {"MB/s": 1e-3, "bytes/s": 1e-9, "TB/s": 1e3}),
    "tflops": ("10^12 operations", {"GFLOPS": 1e-3, "FLOPS": 1e-12, "PFLOPS": 1e3}),
    "params_per_s": ("parameters", {"billions": 1e9, "millions": 1e6}),
}


def example_machines() -> dict[str, Path]:
    """Returns the profiles of published machines that ship with windlass, by name."""
    return {path.stem: path for path in (Path(__file__).parent / "machines").glob("*.yaml")}


def unusual(hardware: Hardware) -> list[str]:
    """Warns about values that are far from any machine, with a guess at the intended unit."""
    warnings = []
    for key, (low, high) in _USUAL.items():
        value: Any = hardware
        for part in key.split("."):
            value = None if value is None else getattr(value, part)
        if value is None or low <= value <= high:
            continue
        unit, others = next((entry for suffix, entry in _UNITS.items() if key.endswith(suffix)), ("pieces", {}))
        meant = [name for name, factor in others.items() if low <= value * factor <= high]
        guess = f", or were {' or '.join(meant)} meant?" if meant else ""
        warnings.append(
            f"{key}: {value:g} is {'less' if value < low else 'more'} than any machine has; is the unit right? "
            f"({unit}{guess})"
        )
    return warnings


def save_hardware(hardware: Hardware, path: Path, *, comment: str = "") -> None:
    """Writes a profile to a file that `load` reads. `comment`: a first line for human readers."""
    text = yaml.safe_dump(hardware.model_dump(exclude_none=True), sort_keys=False)
    path.write_text(f"# {comment}\n{text}" if comment else text)
