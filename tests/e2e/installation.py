"""An installation of windlass as a user has it: a home, the command, and a tiny model to train."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from windlass.service.installation.home import find_serving
from windlass.service.installation.process_ids import ProcessId, find_process, with_descendants
from windlass.service.machine.ray_cluster import RayCluster


@dataclass(frozen=True)
class Installation:
    """A home and a free port, and the command line for them."""

    home: Path
    port: int
    database_url: str | None = None  # None: SQLite in the home

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "WINDLASS_HOME": str(self.home),
            "WINDLASS_PORT": str(self.port),
            "WINDLASS_MEASURE": "0",  # measuring takes half a minute for each home
            "HF_HUB_OFFLINE": "1",
            **({} if self.database_url is None else {"WINDLASS_DATABASE_URL": self.database_url}),
        }

    def run(self, *arguments: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """The exit code and the output of a command."""
        command = [str(Path(sys.executable).with_name("windlass")), *arguments]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def ok(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """The output of a command that must succeed."""
        result = self.run(*arguments, timeout_s=timeout_s)
        assert result.returncode == 0, f"{arguments}: {result.stdout}{result.stderr}{self.logs()}"
        return result.stdout.strip()

    def refused(self, *arguments: str) -> str:
        """The single line on stderr of a command that must fail."""
        result = self.run(*arguments)
        assert result.returncode != 0, result.stdout
        (line,) = result.stderr.splitlines()
        return line

    def await_job(
        self, job_id: str, reached: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = 120.0
    ) -> dict[str, Any]:
        """Waits until `reached` is true for the job, and returns the job."""
        deadline = time.monotonic() + timeout_s
        # Over HTTP: a new process for each request would take CPU time from the job.
        job: dict[str, Any]
        with httpx.Client(base_url=self.url, trust_env=False) as client:
            while not reached(job := client.get(f"/v1/fine_tuning/jobs/{job_id}").json()):
                assert time.monotonic() < deadline, f"never {what}: {job}{self.logs()}"
                time.sleep(0.2)
        return job

    def logs(self) -> str:
        """The end of every log, for a failed test's report."""
        paths = sorted((self.home / "logs").glob("*.log"))
        return "".join(f"\n== {path.name}\n{path.read_text()[-3000:]}" for path in paths)

    def service_processes(self) -> list[ProcessId]:
        """The supervisor, the API, the dispatcher and all their descendants."""
        serving = find_serving(self.home)
        return [] if serving is None else with_descendants([serving.process])

    def ray_processes(self) -> list[ProcessId]:
        """The Ray daemon and all processes that run in it."""
        found = [process for pid in RayCluster(self.home).pids if (process := find_process(pid)) is not None]
        return with_descendants(found)

    def end(self) -> None:
        """Ends all processes, whatever state a failed test has left."""
        if (self.home / "ray.json").exists():
            self.run("down", "--force")
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("WINDLASS_HOME") == str(self.home):
                process.send_signal(signal.SIGKILL)
        RayCluster(self.home).stop()


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_tiny_model(folder: Path, *, num_layers: int = 2) -> None:
    """A Qwen2 model of some 100 thousand random parameters, with a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 10, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def write_examples(path: Path, num_examples: int) -> None:
    """Writes a training file of short texts."""
    lines = [json.dumps({"text": f"example {i}: {i} and {i + 1} make {2 * i + 1}"}) for i in range(num_examples)]
    path.write_text("\n".join(lines) + "\n")
