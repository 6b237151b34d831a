"""Makes the installation that `tests/e2e/test_upgrade.py` upgrades; run it with the release from which users upgrade.

`python -m tests.support.old_installation.make FILE.tar.xz` runs in a checkout of that release. It writes a home with a
paused job and a job that was training when all processes were killed. Renew the archive before a stored format changes.
"""

import argparse
import io
import os
import signal
import tarfile
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tests.e2e.installation import Installation, free_port, make_tiny_model, write_examples

PAUSED_AT, KILLED_AT = 20, 30  # steps
SETTINGS = ("--batch-size", "4", "--sequence-length", "32", "--precision", "bf16")
# Large files that an upgrade does not need.
LEFT_OUT = frozenset({"logs", "ray", "ray-token", "ray.json", "serving.json"})


def make_smaller_model(folder: Path) -> None:
    """A Qwen2 model of 10 thousand random parameters, so that the states of its jobs are a small file."""
    make_tiny_model(folder)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def pack(home: Path, archive: Path) -> None:
    """Writes the files of a home, without owners and times."""

    def cleaned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(member.name).parts
        if len(parts) > 1 and parts[1] in LEFT_OUT:
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as file:
        file.add(home, arcname="home", filter=cleaned)
    archive.write_bytes(buffer.getvalue())


def main() -> None:
    """Runs the release's own service, kills it, and packs its home."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    archive = parser.parse_args().archive
    with tempfile.TemporaryDirectory() as name:
        installation = Installation(home=Path(name) / "home", port=free_port())
        make_smaller_model(installation.home / "models" / "tiny")
        installation.home.chmod(0o700)
        write_examples(Path(name) / "train.jsonl", 80)
        try:
            installation.ok("up", "--detach")
            submit = ("submit", "tiny", str(Path(name) / "train.jsonl"), *SETTINGS)
            paused = installation.ok(*submit, "--epochs", "10", "--suffix", "paused")
            installation.await_job(paused, lambda job: job["windlass"]["step"] >= PAUSED_AT, "trained")
            installation.ok("pause", paused)
            installation.await_job(paused, lambda job: job["status"] == "paused", "paused")
            running = installation.ok(*submit, "--epochs", "500", "--suffix", "running")
            installation.await_job(running, lambda job: job["windlass"]["step"] >= KILLED_AT, "trained")
            for process in [*installation.service_processes(), *installation.ray_processes()]:
                os.kill(process.pid, signal.SIGKILL)
            pack(installation.home, archive)
        finally:
            installation.end()


if __name__ == "__main__":
    main()
