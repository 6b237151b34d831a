"""The peers of the SSD server: fio with io_uring, and DeepSpeed's asynchronous I/O handle."""

import json
import os
import random
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ssd.requests import READ_SHARE, Traffic

MIB = 1 << 20


class PeerMissingError(Exception):
    """Raised if a peer is not installed or cannot run on this machine. The text has the reason."""


def write_file(path: Path, nbytes: int) -> None:
    """Writes a file of random bytes to the disk."""
    block = random.Random(0).randbytes(MIB)
    with path.open("wb") as file:
        for _ in range(-(-nbytes // MIB)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True, kw_only=True)
class FioSetting:
    """A setting of fio. The best one differs by machine."""

    block_nbytes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.block_nbytes // 1024} KiB x {self.depth}"


class Fio:
    """Runs `fio` over one file, sequentially, without the page cache."""

    name = "fio"

    def __init__(self, path: Path, nbytes: int) -> None:
        """Raises PeerMissingError if fio is not installed or io_uring is not permitted."""
        if shutil.which("fio") is None:
            raise PeerMissingError("fio is not installed")
        self._path = path
        self._nbytes = nbytes
        write_file(path, nbytes)
        try:
            self.measure(Traffic.READ, 0.2, FioSetting(block_nbytes=MIB, depth=1))
        except subprocess.CalledProcessError as error:
            raise PeerMissingError(f"fio cannot use io_uring here: {error.stderr.strip()[-200:]}") from error

    def settings(self, request_nbytes: int) -> list[FioSetting]:
        """Returns the settings to try for requests of a size."""
        sizes = [size for size in (512 * 1024, MIB, 2 * MIB, 4 * MIB) if size <= request_nbytes]
        return [FioSetting(block_nbytes=size, depth=depth) for size in sizes for depth in (4, 8, 16, 32)]

    def measure(self, traffic: Traffic, seconds: float, setting: FioSetting) -> float:
        """Returns bytes per second."""
        mode = {Traffic.READ: "read", Traffic.WRITE: "write", Traffic.MIX: "rw"}[traffic]
        command = ["fio", "--name=peer", f"--filename={self._path}", f"--size={self._nbytes // MIB}M", f"--rw={mode}"]
        command += [f"--rwmixread={100 * READ_SHARE[traffic]:.0f}", f"--bs={setting.block_nbytes}"]
        command += [f"--iodepth={setting.depth}", "--ioengine=io_uring", "--direct=1", "--time_based"]
        command += [f"--runtime={seconds * 1000:.0f}ms", "--output-format=json"]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        (job,) = json.loads(result.stdout)["jobs"]
        return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])

    def latency_s(self, nbytes: int) -> float:
        """Returns the mean seconds of one read with nothing else in flight."""
        return nbytes / self.measure(Traffic.READ, 0.5, FioSetting(block_nbytes=nbytes, depth=1))

    def close(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AioSetting:
    """Arguments of DeepSpeed's `aio_handle`."""

    block_nbytes: int
    depth: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.block_nbytes // 1024} KiB x {self.depth} x {self.num_threads} threads"


class DeepSpeedAio:
    """Runs DeepSpeed's `aio_handle` with several pinned buffers in flight, each for a part of one file."""

    name = "DeepSpeed aio"

    def __init__(self, path: Path, nbytes: int, num_in_flight: int) -> None:
        """Raises PeerMissingError if it is not installed or does not compile."""
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            import torch
            from deepspeed.ops.op_builder import AsyncIOBuilder

            self._module = AsyncIOBuilder().load(verbose=False)
        except Exception as error:
            raise PeerMissingError(f"{type(error).__name__}: {error}") from error
        self._torch = torch
        self._path = path
        self._nbytes = nbytes
        self._num_in_flight = num_in_flight
        self._handles: dict[AioSetting, Any] = {}
        self._buffers: dict[tuple[AioSetting, int], list[Any]] = {}
        write_file(path, nbytes)

    def settings(self, request_nbytes: int) -> list[AioSetting]:
        """Returns the settings to try for requests of a size."""
        shapes = [(MIB, 32, 1), (MIB, 32, 2), (MIB, 8, 4), (MIB, 32, 4), (4 * MIB, 8, 4)]
        # A request is divided among the threads first.
        return [
            AioSetting(block_nbytes=block, depth=depth, num_threads=threads)
            for block, depth, threads in shapes
            if block * threads <= max(request_nbytes, MIB) or threads <= 2
        ]

    def measure(self, traffic: Traffic, seconds: float, setting: AioSetting, request_nbytes: int) -> float:
        """Returns bytes per second. Each round starts transfers of all buffers, and waits for all of them."""
        handle = self._handle(setting)
        buffers = self._buffers_of(setting, request_nbytes)
        num_places = self._nbytes // request_nbytes
        moved, turn, num_reads = 0, 0, 0
        start_s = time.perf_counter()
        while moved == 0 or time.perf_counter() - start_s < seconds:
            for buffer in buffers:
                offset = turn % num_places * request_nbytes
                turn += 1
                if num_reads < READ_SHARE[traffic] * turn:
                    num_reads += 1
                    handle.async_pread(buffer, str(self._path), offset)
                else:
                    handle.async_pwrite(buffer, str(self._path), offset)
            handle.wait()
            moved += len(buffers) * request_nbytes
        return moved / (time.perf_counter() - start_s)

    def latency_s(self, nbytes: int) -> float:
        """Returns the median seconds of one read with nothing else in flight."""
        setting = AioSetting(block_nbytes=MIB, depth=32, num_threads=2)
        handle, (buffer, *_) = self._handle(setting), self._buffers_of(setting, nbytes)
        times = []
        for _ in range(100):
            start_s = time.perf_counter()
            handle.async_pread(buffer, str(self._path), 0)
            handle.wait()
            times.append(time.perf_counter() - start_s)
        return sorted(times)[len(times) // 2]

    def release(self) -> None:
        """Frees the buffers. This must happen before buffers of another size are allocated."""
        for (setting, _), buffers in self._buffers.items():
            for buffer in buffers:
                self._handles[setting].free_cpu_locked_tensor(buffer)
        self._buffers.clear()

    def close(self) -> None:
        """Frees everything and removes the file."""
        self.release()
        self._handles.clear()
        self._path.unlink(missing_ok=True)

    def _handle(self, setting: AioSetting) -> Any:
        if setting not in self._handles:
            # (block size, queue depth, single submit, overlap events, threads)
            self._handles[setting] = self._module.aio_handle(
                setting.block_nbytes, setting.depth, False, True, setting.num_threads
            )
        return self._handles[setting]

    def _buffers_of(self, setting: AioSetting, nbytes: int) -> list[Any]:
        if (setting, nbytes) not in self._buffers:
            self.release()
            example = self._torch.empty(0, dtype=self._torch.uint8)
            handle = self._handle(setting)
            self._buffers[(setting, nbytes)] = [
                handle.new_cpu_locked_tensor(nbytes, example) for _ in range(self._num_in_flight)
            ]
        return self._buffers[(setting, nbytes)]
