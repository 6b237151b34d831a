"""A download is whole or not there, one that does not fit is not begun, and a failed one says why."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.support.power_cut import PowerCut
from windlass.service.preparation import hub_download
from windlass.service.preparation.hub_download import main

_MIB = 1024**2


def _run(tmp_path: Path) -> dict[str, Any]:
    result = tmp_path / "result.json"
    arguments = ["--model", "organization/tiny", "--model-dir", str(tmp_path / "models" / "tiny")]
    code = main([*arguments, "--result", str(result)])
    found: dict[str, Any] = json.loads(result.read_text())
    assert (code == 0) == found["ok"]
    return found


def _hub(
    patch: pytest.MonkeyPatch, fetch: Callable[..., Any], files: Callable[[Path], list[Any]] | None = None
) -> None:
    """The hub's library downloads by `fetch`, and says beforehand what it would."""

    def snapshot_download(model: str, *, local_dir: Path, dry_run: bool = False, **options: Any) -> Any:
        if dry_run:
            return [] if files is None else files(local_dir)
        return fetch(model, local_dir=local_dir, **options)

    patch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def _file(folder: Path, name: str, nbytes: int | None, *, will_download: bool = True) -> huggingface_hub.DryRunFileInfo:
    return huggingface_hub.DryRunFileInfo(
        commit_hash="a" * 40,
        file_size=nbytes,
        filename=name,
        local_path=str(folder / name),
        is_cached=not will_download,
        will_download=will_download,
    )


def test_the_folder_takes_its_name_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        assert model == "organization/tiny"
        assert not (tmp_path / "models" / "tiny").exists()
        assert local_dir.name.startswith(".")
        assert not {"*.bin", "*.py", "*.pt"} & set(allow_patterns)
        (local_dir / "config.json").write_text("{}")

    _hub(monkeypatch, fetch)
    assert _run(tmp_path) == {"ok": True}
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]


def test_download_power_loss_afterwards_leaves_the_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(model: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        (local_dir / "config.json").write_text("{}")

    _hub(monkeypatch, fetch)
    (tmp_path / "models").mkdir()
    cut = PowerCut(tmp_path / "models", monkeypatch)
    _run(tmp_path)
    assert cut.left() == {"tiny/config.json": b"{}"}


def test_a_failure_names_the_model_and_the_reason_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: str, **_options: object) -> None:
        raise OSError("401 Client Error: gated repository\nmany more lines")

    _hub(monkeypatch, fetch)
    error = _run(tmp_path)["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'organization/tiny'" in error["message"]
    assert "gated repository" in error["message"]
    assert "\n" not in error["message"]
    assert not (tmp_path / "models" / "tiny").exists()


# --- room ---


def _never(model: str, **_options: object) -> None:
    raise AssertionError("nothing may be downloaded")


@pytest.mark.parametrize(("free_mib", "fits"), [(9, False), (10, True)])
def test_download_that_does_not_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, fits: bool
) -> None:
    """Counted is what is to come: files that are here are left out, and what an interrupted download has of one."""

    def files(folder: Path) -> list[Any]:
        (folder / "here.safetensors").write_text("x")
        begun = folder / ".cache" / "huggingface" / "download" / "a.b.incomplete"
        begun.parent.mkdir(parents=True)
        begun.write_bytes(b"x" * 2 * _MIB)
        return [
            _file(folder, "config.json", None),
            _file(folder, "1.safetensors", 8 * _MIB),
            _file(folder, "here.safetensors", 7 * _MIB, will_download=False),
            # Of the library's own cache, from which it is copied.
            _file(folder, "2.safetensors", 4 * _MIB, will_download=False),
        ]

    def fetch(model: str, *, local_dir: Path, **_options: object) -> None:
        (local_dir / "config.json").write_text("{}")

    _hub(monkeypatch, fetch if fits else _never, files)
    monkeypatch.setattr(hub_download, "directory_free_nbytes", lambda _folder: free_mib * _MIB)
    found = _run(tmp_path)
    assert found["ok"] is fits
    if not fits:
        assert (found["error"]["code"], found["error"]["param"]) == ("does_not_fit", "model")
        assert "'organization/tiny' has 10.00 MiB to download, but 9.00 MiB are free" in found["error"]["message"]
        assert f"{tmp_path / 'models'} (`windlass storage` lists what takes it)" in found["error"]["message"]


def test_hub_that_cannot_be_asked_beforehand_hinders_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is offline, with the model in its library's cache."""

    def files(_folder: Path) -> list[Any]:
        raise huggingface_hub.errors.DryRunError("cannot be accessed")

    _hub(monkeypatch, lambda _model, local_dir, **_: (local_dir / "config.json").write_text("{}"), files)
    assert _run(tmp_path) == {"ok": True}


def test_disk_that_fills_up_during_the_download_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(model: str, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    _hub(monkeypatch, fetch)
    error = _run(tmp_path)["error"]
    assert error["code"] == "does_not_fit"
    assert "No space left on device" in error["message"]
    assert "Make room on the disk" in error["message"]


@contextmanager
def _served_hub(large_nbytes: int) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one model, and the paths of files that were fetched from it."""
    sizes = {"config.json": 2, "model.safetensors": large_nbytes}
    fetched: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/api/models/organization/tiny/revision/main":
                siblings = [{"rfilename": name} for name in sizes]
                self._answer(json.dumps({"id": "organization/tiny", "sha": "a" * 40, "siblings": siblings}).encode())
            elif path.startswith("/api/models/organization/tiny/tree/"):
                tree = [{"type": "file", "path": name, "size": sizes[name], "oid": "b" * 40} for name in sizes]
                self._answer(json.dumps(tree).encode())
            elif (name := path.rpartition("/")[2]) in sizes:
                fetched.append(name)
                self._answer(b"{}")
            else:
                self.send_error(404)

        def do_HEAD(self) -> None:
            self._answer(b"", sizes[self.path.rpartition("/")[2]])

        def _answer(self, body: bytes, nbytes: int | None = None) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("ETag", f'"{"c" * 40}"')
            self.send_header("Content-Length", str(len(body) if nbytes is None else nbytes))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """None."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("large_nbytes", [2, 2**60])
def test_sizes_are_those_that_the_hub_tells(tmp_path: Path, large_nbytes: int) -> None:
    """With the hub's own library, and a hub of this machine."""
    with _served_hub(large_nbytes) as (endpoint, fetched):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        arguments = ["--model", "organization/tiny", "--model-dir", str(tmp_path / "models" / "tiny")]
        done = subprocess.run(
            [sys.executable, "-m", hub_download.__name__, *arguments, "--result", str(tmp_path / "result.json")],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    found = json.loads((tmp_path / "result.json").read_text())
    if large_nbytes == 2:
        assert (done.returncode, found) == (0, {"ok": True}), done.stderr
        assert sorted(path.name for path in (tmp_path / "models" / "tiny").iterdir()) == sorted(fetched)
    else:
        assert (found["error"]["code"], fetched) == ("does_not_fit", []), found
        assert "has 1024.00 PiB to download" in found["error"]["message"]
