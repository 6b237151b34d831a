"""The head's own version of windlass as a wheel, for the boxes that join."""

import functools
import hashlib
import os
import secrets
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import windlass
from windlass.service.validation import ReportedError
from windlass.storage.files import hash_file

_FOLDER = "wheel"  # in the home
# Files of the installed distribution that tell how it was installed.
_LEFT_OUT = frozenset(("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "WHEEL"))
_WHEEL = "Wheel-Version: 1.0\nGenerator: windlass\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_BLOCK_NBYTES = 1024**2


class WheelError(ReportedError):
    """The wheel cannot be made."""


def ensure_wheel(home: Path) -> Path:
    """Returns the wheel of the installed windlass, and makes it if its files have changed. Takes a second.

    Works for an installation from a wheel as from a source tree, without the network.

    Raises:
        WheelError: the installation is incomplete.
        OSError: the wheel cannot be written.
    """
    members = dict(_members())
    state = hashlib.sha256()
    for name, path in members.items():
        facts = path.stat()
        state.update(f"{name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    folder = home / _FOLDER / state.hexdigest()[:16]
    path = folder / f"windlass-{distribution('windlass').version}-py3-none-any.whl"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = folder / f".{secrets.token_hex(6)}.partial"
        try:
            _write(partial, members)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        _remove_others(folder)
    return path


def digest_of_wheel(path: Path) -> str:
    """Returns the SHA-256 of a wheel in hex. It is computed once, because every caller may ask for it."""
    facts = path.stat()
    return _digest(path, facts.st_ino, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _digest(path: Path, _inode: int, _nbytes: int, _mtime_ns: int) -> str:
    return hash_file(path)


def _members() -> Iterator[tuple[str, Path]]:
    """Yields the names in the wheel, in order, and the installed files. Raises WheelError."""
    assert windlass.__file__ is not None
    root = Path(windlass.__file__).parent
    for folder, folders, files in os.walk(root, followlinks=True):  # a source tree has links
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder) / name
            if path.suffix not in (".pyc", ".partial"):
                yield f"windlass/{path.relative_to(root)}", path
    installed = distribution("windlass")
    info = f"windlass-{installed.version}.dist-info"
    files_of_info = [file for file in installed.files or () if file.parts[0].endswith(".dist-info")]
    if not any(file.name == "METADATA" for file in files_of_info):
        raise WheelError("the installed windlass has no METADATA; install it again with pip")
    for file in sorted(files_of_info, key=str):
        if file.name not in _LEFT_OUT:
            yield "/".join((info, *file.parts[1:])), Path(str(file.locate()))


def _write(target: Path, members: dict[str, Path]) -> None:
    info = f"windlass-{distribution('windlass').version}.dist-info"
    record = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:

        def add(name: str, content: bytes) -> None:
            digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")
            wheel.writestr(_entry(name), content)

        for name, path in members.items():
            add(name, path.read_bytes())
        add(f"{info}/WHEEL", _WHEEL.encode())
        lines = [*record, f"{info}/RECORD,,", ""]
        wheel.writestr(_entry(f"{info}/RECORD"), "\n".join(lines))


def _entry(name: str) -> zipfile.ZipInfo:
    """Describes a file with a fixed time, so that the same files make the same wheel."""
    entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry


def _remove_others(folder: Path) -> None:
    for other in folder.parent.iterdir():
        if other != folder:
            for path in other.iterdir():
                path.unlink(missing_ok=True)
            other.rmdir()
