"""Commands that only talk to the service start fast: they import no database, server, Ray or torch."""

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.live_service import LiveService
from windlass.service.installation.home import HomeLock

# Runs each input line as a command, and then prints all imported modules.
_PROGRAM = """
import sys
from windlass.service.cli.commands import main

for line in sys.stdin:
    sys.argv = ["windlass", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0, (line, ended.code)
heavy = ("alembic", "fastapi", "highspy", "numpy", "ray", "sqlalchemy", "starlette", "torch", "transformers")
print("imported:", *(name for name in heavy if name in sys.modules))
"""


def test_client_commands_import_nothing_heavy(service: LiveService, tmp_path: Path) -> None:
    model = service.settings.models_dir / "tiny"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    (model / "model.safetensors").write_bytes(b"weights")
    training_file = tmp_path / "train.jsonl"
    training_file.write_text('{"text": "hello"}\n')
    job = service.run(priority=1)
    service.train(job, 1, 2.5)
    commands = [
        f"submit tiny {training_file} --no-wait",
        "jobs",
        f"show {job}",
        f"logs {job}",
        "files",
        "models",
        "status",
    ]
    commands.append("webhooks list")
    lock = HomeLock(service.settings.home)
    lock.acquire(service.url)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input="\n".join([*commands, f"cancel {job}"]),
        env={**os.environ, "WINDLASS_HOME": str(service.settings.home)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lock.release()
    assert done.returncode == 0, done.stderr
    *printed, imported = done.stdout.splitlines()
    assert printed[-1] == f"job {job} will end after its step"
    assert "train.jsonl" in done.stdout
    assert "training loss=2.5" in done.stdout
    assert "1 running, 1 validating_files" in done.stdout
    assert imported == "imported:"
