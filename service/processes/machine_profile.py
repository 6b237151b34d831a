"""This machine's measured profile: makes it, and checks that it still describes this machine.

Without a profile, jobs run unplanned, so `windlass up` measures the machine. A profile that a user wrote or changed
stays as it is.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from windlass.amounts import GIB
from windlass.planner.hardware import Hardware, YamlFileError, load, save_hardware, unusual
from windlass.service.installation import HARDWARE_FILE, Settings, find_gpus, num_cores
from windlass.service.machine import DoctorError, measure_hardware
from windlass.service.processes.shutdown import is_box_free
from windlass.storage.ids import Precision

_FACTS_FILE = "measured.json"  # in the home, beside the profile
# Relative difference of memory that is ignored, because kernels reserve varying amounts.
_SAME_MEMORY = 0.02

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The facts about the machine on which a profile was measured."""

    cores: int
    memory_gib: float
    gpus: list[str]
    ssds: list[str]
    profile_sha256: str  # of the file as it was saved
    precision: str = Precision.BF16  # in which the device computed

    def changes_since(self, before: "_Facts") -> list[str]:
        """Describes the changes in words."""
        found = []
        if self.cores != before.cores:
            found.append(f"{self.cores} cores, not {before.cores}")
        if abs(self.memory_gib / before.memory_gib - 1) > _SAME_MEMORY:
            found.append(f"{self.memory_gib:.1f} GiB of memory, not {before.memory_gib:.1f}")
        for what, now, then in (("GPUs", self.gpus, before.gpus), ("ssd_dirs", self.ssds, before.ssds)):
            if now != then:
                found.append(f"{what} {_listed(now)}, not {_listed(then)}")
        return found


def measure_and_save(settings: Settings, path: Path, tell: Tell, *, precision: Precision = Precision.BF16) -> Hardware:
    """Measures and saves the machine's profile. `tell` gets lines for the user.

    `precision`: in which the device computes.

    Raises:
        DoctorError: something could not be measured, or the file cannot be written.
    """
    if not path.absolute().parent.is_dir():
        raise DoctorError(f"{path} cannot be written: there is no folder {path.parent}")
    hardware = measure_hardware(settings, tell=tell, precision=precision)
    try:
        save_hardware(hardware, path, comment=f"Measured by `windlass doctor`; gpus.tflops in {precision}.")
        if path == settings.home / HARDWARE_FILE:
            facts = replace(_facts(settings, path.read_bytes()), precision=precision)
            (settings.home / _FACTS_FILE).write_text(json.dumps(asdict(facts), indent=2))
    except OSError as error:
        raise DoctorError(f"{path} cannot be written: {error}") from error
    return hardware


def ensure_measured(settings: Settings, tell: Tell) -> None:
    """Measures this machine if it was never measured, or has changed. The home must exist.

    It only reports failures through `tell`, because the service can run without a profile.
    """
    path = settings.home / HARDWARE_FILE
    reason = _why_to_measure(settings, path, tell)
    if reason is None:
        return
    if not is_box_free(settings):
        tell(f"! {reason}; jobs run, beside which nothing can be measured: run `windlass doctor` once they have ended")
        return
    tell(f"{reason}: measuring, for the planner (half a minute; `--no-measure` skips it)")
    start_s = time.monotonic()
    before = _known_facts(settings)
    precision = Precision.BF16 if before is None else Precision(before.precision)
    try:
        hardware = measure_and_save(settings, path, lambda line: tell(f"  {line}"), precision=precision)
    except DoctorError as error:
        what = "are planned for the machine as it was" if path.exists() else "run without a plan"
        tell(f"! not measured: {error}; jobs {what} until `windlass doctor` succeeds")
        return
    for warning in unusual(hardware):
        tell(f"! {warning}")
    tell(f"measured in {time.monotonic() - start_s:.0f} s, saved as {path}")


def _why_to_measure(settings: Settings, path: Path, tell: Tell) -> str | None:
    if not path.exists():
        return "this machine was not measured yet"
    try:
        profile = load(Hardware, path)
    except YamlFileError as error:
        tell(f"! {error}; jobs run without a plan until it is right, or deleted and measured again")
        return None
    before, now = _known_facts(settings), _facts(settings, path.read_bytes())
    if before is None or before.profile_sha256 != now.profile_sha256:  # the user's own profile
        for what, in_profile, here in (
            ("gpus.count", profile.gpus.count, len(now.gpus)),
            ("ssds.count", profile.ssds.count, len(now.ssds)),
        ):
            if in_profile != here:
                tell(f"! {path}: {what}: {in_profile}, but there are {here} here; `windlass doctor` writes it anew")
        return None
    if changes := now.changes_since(before):
        return f"this machine has changed since it was measured ({'; '.join(changes)})"
    if not profile.gpus.count and profile.gpus.fp32_tflops is None:
        return "this machine's profile has no rate in fp32, of an earlier version"
    return None


def _facts(settings: Settings, profile: bytes) -> _Facts:
    return _Facts(
        cores=num_cores(),
        memory_gib=psutil.virtual_memory().total / GIB,
        gpus=[f"{gpu.name}, {gpu.memory_nbytes / GIB:.1f} GiB" for gpu in find_gpus()],
        ssds=[str(path) for path in settings.ssd_dirs],
        profile_sha256=hashlib.sha256(profile).hexdigest(),
    )


def _known_facts(settings: Settings) -> _Facts | None:
    """Returns the facts of the last measurement, or None if they are missing or of another version."""
    try:
        facts = _Facts(**json.loads((settings.home / _FACTS_FILE).read_text()))
        Precision(facts.precision)
        return facts
    except (OSError, ValueError, TypeError):
        return None


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
