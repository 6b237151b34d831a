"""Moves bytes over the network by one contender: `endpoint.py KIND SIDE HOST PORT NBYTES STREAMS`

SIDE is `receive` or `send`. The receiver listens at HOST and PORT. Each side prints one JSON object: the seconds from
its first to its last byte, and the processor seconds of its process meanwhile.
"""

import functools
import json
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.storage.link.wire import receive_exactly, send_all

if TYPE_CHECKING:
    from windlass.storage.io_scheduler import IoResult

MIB = 1 << 20
_BUFFER_NBYTES = 64 * MIB  # each side goes round in a buffer of this size
_CONNECT_S = 30.0
_KEY_NBYTES = 4 * MIB
_HEADER = struct.Struct("!QQ")
_KEY = b"k" * 16


def main(kind: str, side: str, host: str, port: str, nbytes: str, streams: str) -> None:
    """Runs one side."""
    frame, _, options = kind.partition("-")
    address, count = (host, int(port)), int(streams)
    share = int(nbytes) // count // (4 * MIB) * 4 * MIB
    if frame == "zmq":
        run_s, cpu_s = _run_zmq(side, address, share * count, is_curve=options == "curve")
    elif frame == "link":
        run_s, cpu_s = _run_link(side, address, share * count, count, options)
    elif frame == "gloo":
        run_s, cpu_s = _run_gloo(side, address, share, count)
    else:
        move = functools.partial(_MOVES[kind][side], nbytes=share)
        run_s, cpu_s = _run_sockets(side, address, count, move, kind=frame)
    nbytes_measured = share * count
    unmeasured = _KEY_NBYTES if frame == "link" else 0
    numbers = {"nbytes": nbytes_measured, "all_nbytes": nbytes_measured + unmeasured}
    print(json.dumps({"seconds": run_s, "cpu_s": cpu_s, **numbers}))


class _Meter:
    """The wall time and the processor time since its start."""

    def __init__(self) -> None:
        self._start_s, self._cpu_s = time.monotonic(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.monotonic() - self._start_s, time.process_time() - self._cpu_s


# --- sockets ---


def _run_sockets(
    side: str, address: tuple[str, int], count: int, move: Callable[..., None], *, kind: str
) -> tuple[float, float]:
    if side == "receive":
        with socket.create_server(address, backlog=count) as listener:
            print("ready", file=sys.stderr, flush=True)
            sockets = [listener.accept()[0] for _ in range(count)]
    else:
        sockets = [_connect(address) for _ in range(count)]
    if kind == "tls":
        sockets = [_wrap(each, side) for each in sockets]
    buffer = memoryview(bytearray(_BUFFER_NBYTES))
    lane_nbytes = _BUFFER_NBYTES // count
    lanes = [buffer[lane_nbytes * index : lane_nbytes * (index + 1)] for index in range(count)]
    meter = _Meter()
    threads = [threading.Thread(target=move, args=pair) for pair in zip(sockets, lanes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured = meter.read()
    for each in sockets:
        each.close()
    return measured


def _connect(address: tuple[str, int]) -> socket.socket:
    until_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def _send_plain(connection: socket.socket, lane: memoryview, *, nbytes: int) -> None:
    for start in range(0, nbytes, MIB):
        at = start % lane.nbytes
        send_all(connection, [memoryview(_HEADER.pack(start, MIB)), lane[at : at + MIB]])


def _receive_plain(connection: socket.socket, lane: memoryview, *, nbytes: int) -> None:
    header = memoryview(bytearray(_HEADER.size))
    for start in range(0, nbytes, MIB):
        at = start % lane.nbytes
        receive_exactly(connection, header)
        receive_exactly(connection, lane[at : at + MIB])


# --- TLS ---


def _wrap(connection: socket.socket, side: str) -> ssl.SSLSocket:
    files = Path(os.environ["BENCHMARK_CERTIFICATES"])
    purpose = ssl.PROTOCOL_TLS_SERVER if side == "receive" else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files / "box.pem")
    context.load_verify_locations(files / "authority.pem")
    return context.wrap_socket(connection, server_side=side == "receive")


def _send_tls(connection: socket.socket, lane: memoryview, *, nbytes: int) -> None:
    for start in range(0, nbytes, MIB):
        at = start % lane.nbytes
        connection.sendall(lane[at : at + MIB])


def _receive_tls(connection: socket.socket, lane: memoryview, *, nbytes: int) -> None:
    for start in range(0, nbytes, MIB):
        at = start % lane.nbytes
        into = lane[at : at + MIB]
        while into.nbytes:
            received = connection.recv_into(into)
            if not received:
                raise EOFError
            into = into[received:]


# --- AES-GCM ---


def _send_aes(connection: socket.socket, lane: memoryview, *, nbytes: int, frame: int) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(_KEY)
    out = memoryview(bytearray(frame + 16))
    for number, start in enumerate(range(0, nbytes, frame)):
        at = start % lane.nbytes
        header = _HEADER.pack(start, frame)
        cipher.encrypt_into(number.to_bytes(12, "big"), lane[at : at + frame], header, out)
        send_all(connection, [memoryview(header), out])


def _receive_aes(connection: socket.socket, lane: memoryview, *, nbytes: int, frame: int) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(_KEY)
    received = memoryview(bytearray(frame + 16))
    header = memoryview(bytearray(_HEADER.size))
    for number, start in enumerate(range(0, nbytes, frame)):
        at = start % lane.nbytes
        receive_exactly(connection, header)
        receive_exactly(connection, received)
        cipher.decrypt_into(number.to_bytes(12, "big"), received, bytes(header), lane[at : at + frame])


_MOVES: dict[str, dict[str, Callable[..., None]]] = {
    "plain": {"send": _send_plain, "receive": _receive_plain},
    "tls": {"send": _send_tls, "receive": _receive_tls},
    **{
        f"aes-{mib}": {
            "send": functools.partial(_send_aes, frame=mib * MIB),
            "receive": functools.partial(_receive_aes, frame=mib * MIB),
        }
        for mib in (1, 4)
    },
}


# --- libraries ---


def _run_zmq(side: str, address: tuple[str, int], nbytes: int, *, is_curve: bool) -> tuple[float, float]:
    import zmq

    where = f"tcp://{address[0]}:{address[1]}"
    buffer = memoryview(bytearray(_BUFFER_NBYTES))
    with zmq.Context(io_threads=2) as context:
        connection = context.socket(zmq.PULL if side == "receive" else zmq.PUSH)
        connection.set_hwm(16)
        if is_curve:
            files = Path(os.environ["BENCHMARK_CERTIFICATES"])
            public, secret = (files / "curve.keys").read_bytes().splitlines()
            connection.curve_publickey, connection.curve_secretkey = public, secret
            if side == "receive":
                connection.curve_server = True
            else:
                connection.curve_serverkey = public
        if side == "receive":
            connection.bind(where)
            print("ready", file=sys.stderr, flush=True)
            meter = _Meter()
            for start in range(0, nbytes, MIB):
                # ZeroMQ allocates the memory of a message that it receives. So the bytes are copied to their slot.
                message = connection.recv(copy=False)
                if not start:
                    meter = _Meter()
                at = start % _BUFFER_NBYTES
                buffer[at : at + MIB] = message.buffer
        else:
            connection.connect(where)
            meter = _Meter()
            for start in range(0, nbytes, MIB):
                at = start % _BUFFER_NBYTES
                connection.send(buffer[at : at + MIB], copy=False)
        connection.close(linger=60_000)
    return meter.read()


def _run_gloo(side: str, address: tuple[str, int], share: int, count: int) -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    rank = 0 if side == "receive" else 1
    print("ready", file=sys.stderr, flush=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{address[0]}:{address[1]}", rank=rank, world_size=2)
    groups = [dist.new_group([0, 1], backend="gloo") for _ in range(count)]
    buffer = torch.zeros(_BUFFER_NBYTES, dtype=torch.uint8)
    lane_nbytes = _BUFFER_NBYTES // count

    def move(index: int) -> None:
        for start in range(0, share, MIB):
            at = index * lane_nbytes + start % lane_nbytes
            piece = buffer[at : at + MIB]
            if side == "receive":
                dist.recv(piece, src=1, group=groups[index])
            else:
                dist.send(piece, dst=0, group=groups[index])

    dist.barrier()
    meter = _Meter()
    threads = [threading.Thread(target=move, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured = meter.read()
    dist.destroy_process_group()
    return measured


# --- the link ---


def _run_link(side: str, address: tuple[str, int], nbytes: int, count: int, protection: str) -> tuple[float, float]:
    """Moves keys of 4 MiB: the receiver reserves 16 slots for them, and the sender as many."""
    from windlass.storage.ids import Attempt, BlockIndex, BoxName, JobId, Step
    from windlass.storage.link import Certificates, Identity, KeyKind, Link, LinkKey, LinkSettings, Protection, listen

    files = Path(os.environ["BENCHMARK_CERTIFICATES"])
    box, peer = BoxName(side), BoxName("send" if side == "receive" else "receive")
    settings = LinkSettings(num_streams=count, protection=Protection(protection))
    certificates = Certificates(certificate=files / f"{side}.pem", authority=files / "authority.pem")
    identity = Identity(job=JobId("benchmark"), attempt=Attempt(1), epoch=0, box=box, secret=bytes(32))
    # The box "receive" comes first, so it connects: the sender listens at the port.
    where = address if side == "send" else (os.environ["BENCHMARK_RECEIVER"], 0)
    listener = listen(where[0], where[1])
    link = Link.start(identity, listener, {peer: address}, certificates, settings=settings)
    print("ready", file=sys.stderr, flush=True)
    buffer = memoryview(bytearray(_BUFFER_NBYTES))
    num_slots = _BUFFER_NBYTES // _KEY_NBYTES

    def key_of(number: int) -> LinkKey:
        return LinkKey(kind=KeyKind.ACTIVATION, step=Step(0), block=BlockIndex(number))

    def begin(number: int) -> "Future[IoResult]":
        at = number % num_slots * _KEY_NBYTES
        slot = buffer[at : at + _KEY_NBYTES]
        if side == "receive":
            return link.pull(key_of(number), slot, source=peer)
        return link.offer(key_of(number), slot, {peer})

    number_of_keys = nbytes // _KEY_NBYTES
    # The first key connects the boxes, and is not measured.
    begin(number_of_keys).result(_CONNECT_S)
    meter = _Meter()
    open_ones: deque[Future[IoResult]] = deque()
    for number in range(number_of_keys):
        if len(open_ones) == num_slots:
            open_ones.popleft().result(_CONNECT_S)
        open_ones.append(begin(number))
    for each in open_ones:
        each.result(_CONNECT_S)
    measured = meter.read()
    link.close()
    return measured


if __name__ == "__main__":
    main(*sys.argv[1:])
