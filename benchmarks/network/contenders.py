"""Runs one contender between two boxes of the rig, and returns its rate, its processor time, and its bytes."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import trustme

from tests.support.boxes.network import Box, Network
from windlass.storage.ids import BoxName
from windlass.storage.link import server_name

_PORT = 7400
_TIMEOUT_S = 120.0
_GB = 1e9


class Unavailable(RuntimeError):
    """The contender cannot run on this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run."""

    gb_per_s: float
    cpu_s_per_gb: float | None  # of both sides together
    link_nbytes: int  # that the sender's interface has sent and received
    nbytes: int  # of data


@dataclass(frozen=True, slots=True)
class Rig:
    """Two boxes, and the files that endpoints need."""

    network: Network
    folder: Path
    environment: Mapping[str, str]

    @property
    def receiver(self) -> Box:
        """The box that receives."""
        return self.network["receiver"]

    @property
    def sender(self) -> Box:
        """The box that sends."""
        return self.network["sender"]

    def shape(self, bits_per_s: float | None) -> None:
        """Limits both boxes' links."""
        self.receiver.shape(bits_per_s)
        self.sender.shape(bits_per_s)


def run_endpoints(kind: str, streams: int) -> Callable[[Rig, int], Run]:
    """Returns the runner of a contender of `endpoint.py`."""
    program = Path(__file__).with_name("endpoint.py")

    def run(rig: Rig, nbytes: int) -> Run:
        # Of two boxes with a link, the one whose name comes first connects.
        listening = rig.sender if kind.startswith("link") else rig.receiver

        def command(side: str) -> list[str | Path]:
            where = [listening.address, str(_PORT), str(nbytes), str(streams)]
            return [sys.executable, program, kind, side, *where]

        before = sum(rig.sender.link_nbytes())
        log = rig.receiver.folder / f"{kind}.log"
        log.unlink(missing_ok=True)
        receiver = rig.receiver.start(*command("receive"), log=log.name, environment=rig.environment)
        try:
            _await_ready(log, receiver.poll)
            done = rig.sender.run(*command("send"), environment=rig.environment, timeout_s=_TIMEOUT_S)
            if done.returncode != 0:
                raise Unavailable(done.stderr.strip().splitlines()[-1])
            receiver.wait(_TIMEOUT_S)
        finally:
            receiver.kill()
            receiver.wait()
        after = sum(rig.sender.link_nbytes())
        sent, received = json.loads(done.stdout.splitlines()[-1]), json.loads(log.read_text().splitlines()[-1])
        cpu_s = sent["cpu_s"] + received["cpu_s"]
        nbytes = received["nbytes"]
        return Run(
            gb_per_s=nbytes / _GB / received["seconds"],
            cpu_s_per_gb=cpu_s / (nbytes / _GB),
            link_nbytes=after - before,
            nbytes=received["all_nbytes"],
        )

    return run


def run_iperf3(streams: int) -> Callable[[Rig, int], Run]:
    """Returns the runner of iperf3."""

    def run(rig: Rig, nbytes: int) -> Run:
        log = rig.receiver.folder / "iperf3.log"
        log.unlink(missing_ok=True)
        server = rig.receiver.start("iperf3", "-s", "-1", "--forceflush", log=log.name)
        try:
            _await_ready(log, server.poll, text="listening")
            before = sum(rig.sender.link_nbytes())
            command = ("iperf3", "-c", rig.receiver.address, "-n", str(nbytes), "-P", str(streams), "-J", "-l", "1M")
            done = rig.sender.run(*command, timeout_s=_TIMEOUT_S)
            after = sum(rig.sender.link_nbytes())
        finally:
            server.kill()
            server.wait()
        if done.returncode != 0:
            raise Unavailable(done.stdout.strip()[-200:])
        end = json.loads(done.stdout)["end"]
        seconds, moved = end["sum_received"]["seconds"], end["sum_received"]["bytes"]
        used = end["cpu_utilization_percent"]
        return Run(
            gb_per_s=moved / _GB / seconds,
            cpu_s_per_gb=(used["host_total"] + used["remote_total"]) / 100 * seconds / (moved / _GB),
            link_nbytes=after - before,
            nbytes=moved,
        )

    return run


def run_ucx(rig: Rig, nbytes: int) -> Run:
    """Runs UCX's own benchmark with tagged messages of 1 MiB over TCP. It waits in a busy loop on both sides."""
    environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    count = nbytes >> 20
    before = sum(rig.sender.link_nbytes())
    server = rig.receiver.start("ucx_perftest", "-p", str(_PORT), log="ucx.log", environment=environment)
    try:
        command = ("ucx_perftest", rig.receiver.address, "-p", str(_PORT), "-t", "tag_bw", "-s", str(1 << 20))
        for _ in range(20):
            done = rig.sender.run(*command, "-n", str(count), "-w", "10", "-f", environment=environment, timeout_s=120)
            if done.returncode == 0:
                break
        else:
            raise Unavailable(done.stderr.strip()[-200:])
    finally:
        server.kill()
        server.wait()
    after = sum(rig.sender.link_nbytes())
    # The last line: iterations, three latencies, two bandwidths in MiB/s, two message rates.
    words = [line.split() for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0][0].isdigit()][-1]
    return Run(
        gb_per_s=float(words[-3]) * (1 << 20) / _GB, cpu_s_per_gb=None, link_nbytes=after - before, nbytes=count << 20
    )


LINK = "the link, AES-128-GCM, 4 streams"
PLAIN_LINK = "the link, plain, 4 streams"
IPERF3 = "iperf3, 4 streams"

CONTENDERS: dict[str, Callable[[Rig, int], Run]] = {
    LINK: run_endpoints("link-aes_gcm", 4),
    PLAIN_LINK: run_endpoints("link-plain", 4),
    "iperf3, 1 stream": run_iperf3(1),
    IPERF3: run_iperf3(4),
    "plain sockets, 1 stream": run_endpoints("plain", 1),
    "plain sockets, 4 streams": run_endpoints("plain", 4),
    "TLS 1.3 of Python's ssl, 1 stream": run_endpoints("tls", 1),
    "TLS 1.3 of Python's ssl, 4 streams": run_endpoints("tls", 4),
    "AES-128-GCM frames of 1 MiB, 1 stream": run_endpoints("aes-1", 1),
    "AES-128-GCM frames of 1 MiB, 4 streams": run_endpoints("aes-1", 4),
    "AES-128-GCM frames of 4 MiB, 4 streams": run_endpoints("aes-4", 4),
    "ZeroMQ": run_endpoints("zmq", 1),
    "ZeroMQ with CURVE": run_endpoints("zmq-curve", 1),
    "Gloo, 1 group": run_endpoints("gloo", 1),
    "Gloo, 4 groups": run_endpoints("gloo", 4),
    "UCX over TCP (ucx_perftest)": run_ucx,
}


def _await_ready(log: Path, poll: Callable[[], int | None], *, text: str = "ready") -> None:
    while text not in (log.read_text() if log.exists() else ""):
        if poll() is not None:
            raise Unavailable(log.read_text().strip().splitlines()[-1])
        time.sleep(0.02)


def open_rig(folder: Path) -> Rig:
    """Starts the boxes. The caller closes the network. Raises NamespaceError."""
    network = Network(folder, ("receiver", "sender"))
    return Rig(network, folder, endpoint_environment(folder, network["receiver"].address))


def endpoint_environment(folder: Path, receiver: str) -> dict[str, str]:
    """Makes certificates and keys in a folder, and returns the environment of endpoints."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    authority.issue_cert("box.internal").private_key_and_cert_chain_pem.write_to_path(folder / "box.pem")
    for side in ("receive", "send"):
        certificate = authority.issue_cert(server_name(BoxName(side)))
        certificate.private_key_and_cert_chain_pem.write_to_path(folder / f"{side}.pem")
    try:
        import zmq
    except ImportError:
        pass
    else:
        (folder / "curve.keys").write_bytes(b"\n".join(zmq.curve_keypair()))
    return {
        "BENCHMARK_CERTIFICATES": str(folder),
        "BENCHMARK_RECEIVER": receiver,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
