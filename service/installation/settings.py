"""Settings of an installation: from the environment, then `windlass.toml` in the home, then defaults."""

import ipaddress
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from windlass.actors.lifecycle import numa_nodes
from windlass.service.installation.addresses import is_loopback, is_one_address, is_unspecified
from windlass.service.installation.logs import LogFormat
from windlass.service.installation.machine import num_cores
from windlass.service.validation import ReportedError, describe_value, name_hint, near_names, plain_reason
from windlass.storage.memory import is_out_of_space
from windlass.storage.ssd import is_device_path

ENV_PREFIX = "WINDLASS_"
KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"  # the key of this machine's command line: no setting
# Both in the home.
SETTINGS_FILE = "windlass.toml"
HARDWARE_FILE = "hardware.yaml"

# From so many cores on, each thread of a job has one of its own. With fewer, on a machine without a GPU, that costs
# more than sharing them (docs/decisions/0008-thread-budgets.md).
CORES_TO_DIVIDE = 8

_NAME_ANOTHER = "name a directory on an SSD that you may write to"
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}))*")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_TB_NBYTES = 10**12  # as data sheets count
_Days = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Tbw = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Up to the last @: a password that is not encoded as it should be may have one itself.
_PASSWORD = re.compile(r"(?<=://)([^:/@]*:).*(?=@)|([?&]password=)[^&]*", re.DOTALL)


class SettingsError(ReportedError, ValueError):
    """A setting is wrong. The message names its source, its key and its value."""


class Settings(BaseSettings):
    """The installation. Read it with `load_settings`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    home: Path
    host: str = "127.0.0.1"
    port: int = Field(default=8642, ge=1, le=65535)
    database_url: str = ""
    ray_address: str | None = None  # None: a Ray daemon of windlass's own
    # One SSD server each; name one directory on every SSD, or the SSD's block device.
    ssd_dirs: Annotated[tuple[Path, ...], NoDecode] = ()
    # Terabytes written that one SSD is rated for: none, one number for all, or one for each of ssd_dirs.
    ssd_endurance_tbw: Annotated[tuple[_Tbw, ...], NoDecode] = ()
    models_dir: Path = Path()
    host_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # None: what the machine has free
    gpu_memory_gib: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    num_cpu_optimizers: int = Field(default_factory=lambda: len(numa_nodes()), ge=1)  # of each job; one a NUMA node
    compute_threads: int | None = Field(default=None, ge=1)  # of each GPU worker; None: by cores and GPUs
    optimizer_threads: int | None = Field(default=None, ge=1)  # of each optimizer; None: by cores and GPUs
    # The devices that the CPU of a machine without GPUs counts as, to try out jobs on several.
    cpu_ranks: int = Field(default=1, ge=1, le=16)
    # The address at which other boxes reach this one, which then is their head; None: no other box joins.
    cluster_host: str | None = None
    cluster_port: int = Field(default=8643, ge=1, le=65535)
    # The address at which other boxes of a job reach this one. None: a box takes that from which it calls its head, and
    # a head takes cluster_host.
    link_host: str | None = None
    link_ports: str | None = None  # the ports for it, such as "7700-7719"; None: any that is free
    # Minutes without an answer of the head after which a box ends its attempts, each at a commit.
    box_lease_minutes: float = Field(default=10, gt=0, le=60 * 24 * 365)
    max_attempts: int = Field(default=5, ge=1)  # that are lost in a row, without a step of progress, before a job fails
    # Names, besides that of this machine alone, under which the service is reached; no port.
    host_names: Annotated[tuple[str, ...], NoDecode] = ()
    # Addresses or networks of the proxies whose word on the sender's address and scheme counts.
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = ()
    tls_certificate: Path | None = None  # PEM, with what leads to a known authority
    tls_key: Path | None = None
    login_hours: float = Field(default=12, gt=0, le=24 * 365)  # that a login on the dashboard lasts
    requests_per_minute: int = Field(default=1200, ge=1)  # of one key
    max_connections: int = Field(default=1000, ge=1)  # of the API, open at once
    max_connections_per_address: int = Field(default=200, ge=1)  # but for those of trusted proxies
    max_request_kib: int = Field(default=1024, ge=1)  # but for uploads
    max_file_mib: int = Field(default=512, ge=1)
    max_files_per_user: int = Field(default=1000, ge=1)
    max_file_gib_per_user: float = Field(default=100, gt=0, allow_inf_nan=False)
    # Files, and what a user's jobs leave; None: no limit, as models and disks are of any size. Admins have none.
    max_stored_gib_per_user: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    # What users, who are no admins, may ask for; a key may have other limits (see service.user_limits).
    most_urgent_priority: int = Field(default=0, ge=-1000, le=1000)
    max_running_jobs_per_user: int | None = Field(default=None, ge=1)  # at once; None: as many as there is room for
    max_waiting_jobs_per_user: int = Field(default=100, ge=0)
    max_webhook_endpoints_per_user: int = Field(default=10, ge=0)
    # How long what is finished, and in no use, is kept after its end or its last use; None: until somebody deletes it.
    keep_jobs_days: _Days | None = None
    keep_checkpoints_days: _Days | None = None
    keep_files_days: _Days | None = None
    webhook_private_addresses: bool = False  # else webhooks go to public addresses only, by HTTPS
    log_format: LogFormat = LogFormat.TEXT  # of the files in `logs`
    log_mib: int = Field(default=64, ge=1)  # of one log, and as much of what it held before
    measure: bool = True  # `windlass up` measures the machine, where it was not yet

    @field_validator("ssd_dirs", "ssd_endurance_tbw", "host_names", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, (int, float)):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("ssd_dirs")
    @classmethod
    def _distinct_directories_or_devices(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        if not paths:
            raise ValueError("must name at least one directory or block device")
        seen: dict[str, Path] = {}
        for path in paths:
            if not path.is_absolute():
                raise ValueError(f"must be absolute paths, got {str(path)!r}")
            _check_kind(path)
            real = os.path.realpath(path)
            if real in seen:
                raise ValueError(f"{path} is the same place as {seen[real]}; name each SSD once")
            seen[real] = path
        return paths

    @field_validator("ssd_endurance_tbw")
    @classmethod
    def _one_rating_or_one_for_each(cls, ratings: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        num_ssds = len(info.data.get("ssd_dirs", ratings))  # absent where it is wrong itself
        if len(ratings) not in (0, 1, num_ssds):
            raise ValueError(
                f"must be one number, or one for each of the {num_ssds} entries of ssd_dirs, got {len(ratings)} numbers"
            )
        return ratings

    @field_validator("num_cpu_optimizers", "compute_threads", "optimizer_threads")
    @classmethod
    def _no_more_than_cores(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None:
            return None
        cores, name = num_cores(), info.field_name
        if value > cores:
            raise ValueError(f"must be at most {cores}, the cores that windlass may use here")
        # What is wrong itself is absent; where nothing is asked for, there is one thread at least.
        num_optimizers = value if name == "num_cpu_optimizers" else info.data.get("num_cpu_optimizers", 1)
        compute = value if name == "compute_threads" else info.data.get("compute_threads") or 1
        each = value if name == "optimizer_threads" else 1
        terms, num_threads = f"num_cpu_optimizers {num_optimizers} x optimizer_threads {each}", num_optimizers * each
        if cores >= CORES_TO_DIVIDE:
            terms, num_threads = f"{terms} + compute_threads {compute}", num_threads + compute
        if num_threads > cores:
            raise ValueError(f"{terms} = {num_threads} threads on {cores} cores; lower one of them")
        return value

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str, info: ValidationInfo) -> str:
        if value == _database_of(info.data["home"]):
            return value
        # Here, as it is most of what a command without a database imports.
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        from windlass.storage.sql import SUPPORTED_DATABASES

        try:
            backend = make_url(value).get_backend_name()
        except ArgumentError as error:
            raise ValueError(str(error)) from None
        if backend not in SUPPORTED_DATABASES:
            raise ValueError(f"must be one of {', '.join(SUPPORTED_DATABASES)}")
        return value

    @field_validator("host")
    @classmethod
    def _address_to_bind(cls, value: str) -> str:
        if value != "localhost":
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ValueError("must be an IP address, such as 127.0.0.1, or 0.0.0.0 for all of them") from None
        return value

    @field_validator("link_host")
    @classmethod
    def _address_of_this_machine(cls, value: str | None) -> str | None:
        if value is not None and not is_one_address(value):
            raise ValueError("must be one IP address of this machine that the other boxes reach, such as 192.168.1.10")
        return value

    @field_validator("link_ports", mode="before")
    @classmethod
    def _range_of_ports(cls, value: Any) -> str | None:
        if value is None:
            return None
        found = _PORTS.fullmatch(str(value))
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last <= 65535:
            raise ValueError("must be a range of ports, such as 7700-7719")
        return f"{first}-{last}"

    @field_validator("host_names")
    @classmethod
    def _plain_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(f"must be names such as box.example.org, without scheme and port, got {name!r}")
        return tuple(name.lower() for name in names)

    @field_validator("trusted_proxies")
    @classmethod
    def _addresses_or_networks(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            try:
                ipaddress.ip_network(value)
            except ValueError:
                raise ValueError(f"must be addresses, or networks such as 10.0.0.0/24, got {value!r}") from None
        return values

    @field_validator("tls_certificate", "tls_key")
    @classmethod
    def _file_there(cls, value: Path | None) -> Path | None:
        if value is not None and not (value.is_absolute() and os.access(value, os.R_OK) and value.is_file()):
            raise ValueError("must be the absolute path of a file that you may read")
        return value

    @field_validator("tls_key")
    @classmethod
    def _nobody_elses_to_read(cls, value: Path | None) -> Path | None:
        if value is not None and value.stat().st_mode & stat.S_IROTH:
            raise ValueError(f"anybody may read it; run `chmod 600 {value}`")
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_from_home(cls, values: dict[str, Any]) -> dict[str, Any]:
        home = Path(values["home"]).expanduser().absolute()
        defaults = {
            "database_url": _database_of(home),
            "ssd_dirs": (home / "ssd0", home / "ssd1"),
            "models_dir": home / "models",
        }
        return {**defaults, **values, "home": home}

    @model_validator(mode="after")
    def _models_dir_is_absolute(self) -> Self:
        if not self.models_dir.is_absolute():
            raise ValueError(f"models_dir must be an absolute path, got {str(self.models_dir)!r}")
        return self

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together; give both or none")
        return self

    @property
    def is_for_others(self) -> bool:
        """Tells whether users of other machines reach the service. Then every request needs a key."""
        return self.why_for_others is not None

    @property
    def why_for_others(self) -> str | None:
        """The setting by which others reach the service, in words; None if they do not."""
        if not is_loopback(self.host):
            return f"host is {self.host}"
        if self.host_names:
            return f"host_names is {', '.join(self.host_names)}"
        return f"trusted_proxies is {', '.join(self.trusted_proxies)}" if self.trusted_proxies else None

    @property
    def link_port_range(self) -> range | None:
        """The ports of `link_ports`; None: any that is free."""
        if self.link_ports is None:
            return None
        first, last = map(int, self.link_ports.split("-"))
        return range(first, last + 1)

    @property
    def files_dir(self) -> Path:
        """Uploaded and result files, each under its id."""
        return self.home / "files"

    @property
    def jobs_dir(self) -> Path:
        """One folder a job: journal, logs, prepared data."""
        return self.home / "jobs"

    @property
    def fine_tuned_dir(self) -> Path:
        """Fine-tuned models and checkpoints, each in a folder named like its model id."""
        return self.home / "fine-tuned"

    @property
    def max_file_nbytes(self) -> int:
        """The largest upload."""
        return self.max_file_mib * 1024**2

    @property
    def ssd_endurance_nbytes(self) -> tuple[float, ...]:
        """Bytes that each SSD is rated for, in the order of `ssd_dirs`; empty where the setting is not given."""
        ratings = tuple(tbw * _TB_NBYTES for tbw in self.ssd_endurance_tbw)
        return ratings * len(self.ssd_dirs) if len(ratings) == 1 else ratings

    @property
    def max_request_nbytes(self) -> int:
        """The longest body of a request that is no upload."""
        return self.max_request_kib * 1024

    @property
    def base_url(self) -> str:
        """The URL at which the service answers programs of this machine."""
        host = ("::1" if ":" in self.host else "127.0.0.1") if is_unspecified(self.host) else self.host
        host = f"[{host}]" if ":" in host else host
        return f"{'http' if self.tls_certificate is None else 'https'}://{host}:{self.port}"

    def make_dirs(self) -> None:
        """Create the home's folders and the SSD directories, readable by their owner only; devices are left alone.

        Raises SettingsError for an SSD directory that cannot be made, or in which this user cannot make files.
        """
        self.make_home_dirs()
        for path in self.ssd_dirs:
            if not is_device_path(path):
                _make_ssd_dir(path)

    def make_home_dirs(self) -> None:
        """Create the home's folders only: the API may run where the SSDs are not."""
        for path in (self.home, self.files_dir, self.jobs_dir, self.fine_tuned_dir, self.models_dir):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _database_of(home: Path) -> str:
    """The URL of a home's own database."""
    return f"sqlite:///{home / 'windlass.db'}"


def place_of_home(home: Path | None = None) -> Path:
    """The home that is meant: the one given, `WINDLASS_HOME`, or `~/.windlass`."""
    home = home or Path(os.environ.get(f"{ENV_PREFIX}HOME") or "~/.windlass")
    return home.expanduser().absolute()


def load_settings(home: Path | None = None) -> Settings:
    """Read the settings of a home: the one given, `WINDLASS_HOME`, or `~/.windlass`. Raises SettingsError."""
    home = place_of_home(home)
    file = home / SETTINGS_FILE
    _check_variables()
    # Only what the environment leaves open: arguments win over it.
    values = {key: value for key, value in _read_file(file).items() if not os.environ.get(_env_name(key))}
    try:
        return Settings(**{**values, "home": home})
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(detail, file) for detail in error.errors())) from None


def _make_ssd_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if is_out_of_space(error):
            raise  # the home's error names the full disk
        raise SettingsError(f"ssd_dirs: {path} cannot be made ({error.strerror}); {_NAME_ANOTHER}") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise SettingsError(f"ssd_dirs: you may not write to {path}; change its owner, or {_NAME_ANOTHER}")


def _check_kind(path: Path) -> None:
    """Refuse what is there and is neither a directory nor a block device; ValueError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return  # a directory is made, a device may be plugged in later
    except OSError as error:
        raise ValueError(f"{path} cannot be looked at: {error.strerror}") from None
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode):
        return
    kind = "a regular file" if stat.S_ISREG(mode) else "a character device" if stat.S_ISCHR(mode) else "something else"
    raise ValueError(f"{path} is {kind}; name a directory on an SSD, or a block device such as /dev/nvme0n1")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read: {error}") from None
    known = sorted(set(Settings.model_fields) - {"home"})
    for key, value in values.items():
        if key not in known:
            hint = name_hint(key, known) or f"; there are {', '.join(known)}"
            raise SettingsError(f"{file}: {key} = {_shown(value)}: there is no such setting{hint}")
    return values


def _check_variables() -> None:
    """Raise SettingsError for a variable of the environment whose name looks like a setting's, misspelt.

    All others are left alone: Kubernetes, for one, sets WINDLASS_SERVICE_HOST for a service named windlass.
    """
    # Compared without the prefix, because two long names are near for having the prefix in common.
    known = {key.upper(): _env_name(key) for key in Settings.model_fields}
    known[KEY_VARIABLE.removeprefix(ENV_PREFIX)] = KEY_VARIABLE
    for name, value in os.environ.items():
        key = name.upper().removeprefix(ENV_PREFIX)
        if value and name.upper().startswith(ENV_PREFIX) and key not in known and (near := near_names(key, known)):
            # Without its value, because that may be a key.
            raise SettingsError(f"environment: {name}: there is no such setting; did you mean {known[near[0]]}?")


def _env_name(key: str) -> str:
    return f"{ENV_PREFIX}{key.upper()}"


def _explain(detail: ErrorDetails, file: Path) -> str:
    message = plain_reason(detail)
    if not detail["loc"]:  # about several settings: the message names them
        return f"{file} or the environment: {message}"
    key = str(detail["loc"][0])
    from_environment = os.environ.get(_env_name(key))
    if from_environment:
        return f"environment: {_env_name(key)} = {_shown(from_environment)}: {message}"
    return f"{file}: {key} = {_shown(detail['input'])}: {message}"


def _shown(value: object) -> str:
    """As it goes into messages, and so into logs: without the password of a database's URL."""
    return describe_value(_PASSWORD.sub(r"\1\2***", value) if isinstance(value, str) else value)
